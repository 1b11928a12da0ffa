"""Modules whose own code takes a mean or a variance over a width that is split.

A norm over the whole width of q or k, between the projections and the attention, sees the features
of this rank's heads only. Its own forward runs here, but every mean, variance or standard deviation
over the last dim is taken over the whole width: one all-reduce of one number a row. Features that a
rank has twice, or that another rank counts, are left out of the sums.

Source: Ba et al., Layer Normalization (arXiv 1607.06450), eq. 3; Zhang and Sennrich, Root Mean
Square Layer Normalization (arXiv 1910.07467), eq. 4.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from plait.comm import copy_to, sum_from
from plait.errors import PlanError
from plait.plan.intervals import Pieces, even
from plait.styles.heads import PlacedParams, cut_layout, cut_of, place_features, rearranged
from plait.styles.layer import TensorParallelLayer
from plait.styles.params import LocalParams
from plait.styles.registry import ALL_PARALLEL_STYLES


class SplitNorm(TensorParallelLayer):
    """A norm over a width that is split: q or k as a whole, or what comes before a rowwise layer.

    Parameters: cut along their only dim, as the width is.

    Comm:
        Forward one all-reduce of one number a row (an RMS norm), or two of them (a layer norm).
        Backward as many.
    """

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter that has more than one dim."""
        tensor = module._parameters.get(param)
        if tensor is not None and tensor.ndim != 1:
            raise PlanError(
                f"Style 'split_norm' on {parameter_name or param!r}:",
                f"it has the shape {tuple(tensor.shape)}; a norm over a width has one dim",
                "give it the style 'replicate'",
            )

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> Any:
        """The features of the rank's own heads, where they are no ordinary shard."""
        return cut_layout(module, param, 0)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut it along the width."""
        place_features(module, param, mesh, 0)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, statistics over the whole width."""
        found = next((p for p in module._parameters.values() if p is not None), None)
        cut = cut_of(module)
        context = ExitStack()
        if found is not None:
            whole = found.shape[0]
            counted = cut.counted if cut is not None else None
            local = cut.seen_size if cut is not None else _even_size(whole, mesh)
            context.enter_context(_Closing(PlacedParams(module, self.grads_of(module))))
            context.enter_context(WholeStatistics(local, whole, counted, mesh))
        return context


class SplitStatistics(TensorParallelLayer):
    """A module that takes statistics over the output width of its own colwise layers.

    An MLP that keeps the largest activations only (mean and standard deviation over the
    intermediate width) is the usual case. The parameters of the module itself stay whole.

    Comm:
        Forward one all-reduce of one number a row for a mean, two for a variance or a standard
        deviation. Backward as many.
    """

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, statistics over the whole width."""
        widths = {
            width
            for child in module.children()
            if getattr(child, "_plait_border", None) is not None
            and isinstance(width := getattr(child, "out_features", None), int)
        }
        context = ExitStack()
        context.enter_context(_Closing(LocalParams(module, self.grads_of(module))))
        for width in widths:
            local = _even_size(width, mesh)
            if local != width:
                context.enter_context(WholeStatistics(local, width, None, mesh))
        return context


class _Closing:
    def __init__(self, inner: LocalParams) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(None, None, None)


def _even_size(width: int, mesh: DeviceMesh) -> int:
    return even((width,), 0, mesh.size()).local_shape(mesh.get_local_rank())[0]


class WholeStatistics(TorchFunctionMode):
    """Makes statistics over a last dim of `local` features those over all `whole` of them.

    Args:
        local: Features of the last dim on this rank.
        whole: Features of the whole model.
        counted: Ranges of the local features that this rank counts; None: all.
        mesh: The axis.

    Comm:
        Each mean: forward one all-reduce, backward one.
    """

    def __init__(self, local: int, whole: int, counted: Pieces | None, mesh: DeviceMesh) -> None:
        super().__init__()
        self.local, self.whole, self.counted, self.mesh = local, whole, counted, mesh

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers means, variances and norms over the last dim; leaves all else alone."""
        kwargs = kwargs or {}
        mine = _ANSWERS.get(func)
        x = args[0] if args else kwargs.get("input")
        if mine is not None and isinstance(x, torch.Tensor) and self._concerns(x, args, kwargs):
            return mine(self, x, args[1:], kwargs)
        return func(*args, **kwargs)

    def _concerns(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is about the last dim, and that is the split one."""
        if x.ndim == 0 or x.shape[-1] != self.local:
            return False
        if "normalized_shape" in kwargs:
            return tuple(kwargs["normalized_shape"]) == (self.whole,)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dim, torch.Size | tuple | list) and len(dim) == 1:
            dim = dim[0]
        return dim in (-1, x.ndim - 1, self.whole)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the whole width, `[..., 1]`."""
        counted = x if self.counted is None else rearranged(x, -1, self.counted)
        total = copy_to(sum_from(counted.sum(-1, keepdim=True), self.mesh), self.mesh)
        return total / self.whole

    def variance(self, x: torch.Tensor) -> torch.Tensor:
        """The variance over the whole width, without correction, `[..., 1]`."""
        return self.mean((x - self.mean(x)).square())


def _kept(x: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any], at: int) -> torch.Tensor:
    keep = kwargs.get("keepdim", rest[at] if len(rest) > at else False)
    return x if keep else x.squeeze(-1)


def _mean(mode: WholeStatistics, x: torch.Tensor, rest: Any, kwargs: Any) -> torch.Tensor:
    if kwargs.get("dtype") is not None:
        x = x.to(kwargs["dtype"])
    return _kept(mode.mean(x), rest, kwargs, 1)


def _variance(mode: WholeStatistics, x: torch.Tensor, rest: Any, kwargs: Any) -> torch.Tensor:
    correction = kwargs.get("correction", kwargs.get("unbiased", rest[1] if len(rest) > 1 else 1))
    scale = mode.whole / (mode.whole - int(correction))
    return _kept(mode.variance(x) * scale, rest, kwargs, 2)


def _deviation(mode: WholeStatistics, x: torch.Tensor, rest: Any, kwargs: Any) -> torch.Tensor:
    return _variance(mode, x, rest, kwargs).sqrt()


def _layer_norm(mode: WholeStatistics, x: torch.Tensor, rest: Any, kwargs: Any) -> torch.Tensor:
    names = ("normalized_shape", "weight", "bias", "eps")
    given = dict(zip(names, rest, strict=False)) | kwargs
    centred = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = centred - mode.mean(centred)
    found = centred * torch.rsqrt(mode.mean(centred.square()) + given.get("eps", 1e-5))
    return _affine(found, x, given)


def _rms_norm(mode: WholeStatistics, x: torch.Tensor, rest: Any, kwargs: Any) -> torch.Tensor:
    given = dict(zip(("normalized_shape", "weight", "eps"), rest, strict=False)) | kwargs
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    eps = given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(wide * torch.rsqrt(mode.mean(wide.square()) + eps), x, given)


def _affine(found: torch.Tensor, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    if given.get("weight") is not None:
        found = found * given["weight"]
    if given.get("bias") is not None:
        found = found + given["bias"]
    return found.to(x.dtype)


_ANSWERS: dict[Any, Callable[[WholeStatistics, torch.Tensor, Any, Any], torch.Tensor]] = {
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.var: _variance,
    torch.Tensor.var: _variance,
    torch.std: _deviation,
    torch.Tensor.std: _deviation,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}

ALL_PARALLEL_STYLES.register("split_norm", SplitNorm())
ALL_PARALLEL_STYLES.register("split_statistics", SplitStatistics())
