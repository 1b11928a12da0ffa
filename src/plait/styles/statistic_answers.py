"""Torch functions that take a mean, a variance or a norm, and what they give over all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from plait.styles.whole_statistics import Statistics


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x`, in float32 where it is half-precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class Answer:
    """How one torch function is answered.

    Attributes:
        answer: From the mode, the tensor and the arguments by name.
        names: What the positional arguments after the tensor are called.
        dim: The dim where none is given.
    """

    answer: Callable[[Any, torch.Tensor, dict[str, Any]], Any]
    names: tuple[str, ...] = ("dim", "keepdim", "dtype")
    dim: int | None = None

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, without the tensor."""
        found = dict(zip(self.names, args[1:], strict=False)) | dict(kwargs)
        for old, new in (("axis", "dim"), ("ord", "p")):
            if old in found:
                found[new] = found.pop(old)
        if type(found.get("dim")) is bool:  # var(x, unbiased)
            found["unbiased"] = found.pop("dim")
        return found


def _left(x: torch.Tensor, given: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if given.get("keepdim", False) else x.squeeze(-1)


def _typed(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return x if given.get("dtype") is None else x.to(given["dtype"])


def _mean(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    x = _typed(x, given)
    return _left(mode.mean(x), given, x.dtype)


def _sum(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    x = _typed(x, given)
    total = mode.sum(x)
    return _left(total, given, x.dtype if x.is_floating_point() else total.dtype)


def _norm(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    x = _typed(x, given)
    return _left(mode.norm(x, given.get("p", 2)), given, x.dtype)


def _normalize(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    norm = mode.norm(x, given.get("p", 2)).to(x.dtype)
    return x / norm.clamp_min(given.get("eps", 1e-12))


def _moments(
    mode: "Statistics", x: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    correction = given.get("correction", given.get("unbiased", 1))
    scale = mode.width.whole / (mode.width.whole - int(1 if correction is None else correction))
    mean = mode.mean(x)
    return mode.variance(x, mean) * scale, mean


def _variance(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return _left(_moments(mode, x, given)[0], given, x.dtype)


def _deviation(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return _left(_moments(mode, x, given)[0].sqrt(), given, x.dtype)


def _variance_mean(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> Any:
    return tuple(_left(part, given, x.dtype) for part in _moments(mode, x, given))


def _deviation_mean(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> Any:
    variance, mean = _moments(mode, x, given)
    return _left(variance.sqrt(), given, x.dtype), _left(mean, given, x.dtype)


def _layer_norm(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    centred = wide(x)
    centred = centred - mode.mean(centred)
    found = centred * torch.rsqrt(mode.mean(centred.square()) + given.get("eps", 1e-5))
    return _affine(found, x, given)


def _rms_norm(mode: "Statistics", x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    full, eps = wide(x), given.get("eps")
    eps = torch.finfo(full.dtype).eps if eps is None else eps
    return _affine(full * torch.rsqrt(mode.mean(full.square()) + eps), x, given)


def _affine(found: torch.Tensor, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    if given.get("weight") is not None:
        found = found * given["weight"]
    if given.get("bias") is not None:
        found = found + given["bias"]
    return found.to(x.dtype)


_MOMENTS = ("dim", "unbiased", "keepdim")
_AFFINE = ("normalized_shape", "weight", "bias", "eps")
ANSWERS: dict[Any, Answer] = {
    **dict.fromkeys((torch.mean, torch.Tensor.mean), Answer(_mean)),
    **dict.fromkeys((torch.var, torch.Tensor.var), Answer(_variance, _MOMENTS)),
    **dict.fromkeys((torch.std, torch.Tensor.std), Answer(_deviation, _MOMENTS)),
    torch.var_mean: Answer(_variance_mean, _MOMENTS),
    torch.std_mean: Answer(_deviation_mean, _MOMENTS),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), Answer(_layer_norm, _AFFINE)),
    **dict.fromkeys(
        (F.rms_norm, torch.rms_norm), Answer(_rms_norm, ("normalized_shape", "weight", "eps"))
    ),
}
_NORM = ("p", "dim", "keepdim", "dtype")
SUMS: dict[Any, Answer] = {
    **dict.fromkeys((torch.sum, torch.Tensor.sum), Answer(_sum)),
    torch.norm: Answer(_norm, ("p", "dim", "keepdim", "out", "dtype")),
    torch.Tensor.norm: Answer(_norm, _NORM),
    torch.linalg.norm: Answer(_norm, _NORM),
    torch.linalg.vector_norm: Answer(_norm, _NORM),
    F.normalize: Answer(_normalize, ("p", "dim", "eps"), dim=1),
}
"""Functions that are statistics in a norm only."""
SIZES = frozenset(
    {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__}  # type: ignore[attr-defined]
)
