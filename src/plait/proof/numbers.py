"""Numbers of two runs: which tensors there are, how far apart, and in which precision.

Correct parallelism in float64 differs from one process by rounding, about 1e-15 of a tensor's
largest value. Many models compute norms, softmax and loss in float32 whatever their dtype is, which
would add 1e-7; [`exact`][plait.proof.numbers.exact] keeps them in float64.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from plait.loss import SplitLogits

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}
"""Largest difference, as a fraction of the tensor's largest value, by dtype."""

FLOOR = 1e-4
"""A gradient's scale is at least this fraction of the largest gradient: some gradients are zero but
for rounding (a key bias cannot move a softmax), and have no scale of their own."""

NOT_COMPARED = ("past_key_values", "cache_params", "encoder_past_key_values")
"""Outputs that hold a rank's own part of a cache."""


PER_HEAD = ("attentions", "decoder_attentions", "encoder_attentions", "cross_attentions")
"""Outputs with one part for each head."""


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Inside, whatever asks for float32 gets float64: casts, `dtype=` arguments, new tensors."""
    with _Exact():
        yield


class _Exact(TorchFunctionMode):
    """Rewrites the arguments of torch functions; `x.float()` becomes `x.double()`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = tuple(torch.float64 if x is torch.float32 else x for x in args)
        named = {
            name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()
        }
        return func(*wide, **named)


def tensors(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in what a module takes or gives, by name or position; caches are left out."""
    if isinstance(output, SplitLogits):
        yield prefix or "output", output.whole()
    elif isinstance(output, torch.Tensor):
        yield prefix or "output", output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in NOT_COMPARED:
                yield from tensors(value, f"{prefix}.{name}".lstrip("."))
    elif isinstance(output, tuple | list):
        for number, value in enumerate(output):
            yield from tensors(value, f"{prefix}[{number}]")


def weighted(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A fixed random weighting of a tensor, in place of a loss.

    Unlike a plain sum it notices a gradient that is merely scaled or permuted.
    """
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    return (x * weights.to(x.dtype).to(x.device)).sum()


def loss_of(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The output named `loss`, or a weighting of all outputs that gradients reach.

    What attention shows of its own heads is left out: a rank of a split model has a slice of it.
    """
    loss = outputs.get("loss")
    if loss is not None:
        return loss
    reached = {
        name: x
        for name, x in outputs.items()
        if x.requires_grad and name.partition("[")[0] not in PER_HEAD
    }
    terms = [weighted(x, seed) for seed, x in enumerate((reached or outputs).values())]
    return functools.reduce(lambda total, x: total + x.to(total), terms)


def gap_and_scale(x: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest difference of two tensors of one shape, and the expected one's largest value.

    Equal infinities differ by nothing; a NaN differs by infinity.
    """
    if expected.numel() == 0:
        return 0.0, 0.0
    a, b = (t.detach().to("cpu", torch.float64) for t in (x, expected))
    gap = float(torch.where(a == b, 0.0, (a - b).abs()).max())
    finite = b.abs()[torch.isfinite(b)]
    scale = float(finite.max()) if finite.numel() else 0.0
    return (gap if gap == gap else float("inf")), scale


def difference(x: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference ÷ the expected tensor's scale; infinite for other shapes or for NaN."""
    if x.shape != expected.shape:
        return float("inf")
    gap, scale = gap_and_scale(x, expected)
    return ratio(gap, max(scale, floor))


def ratio(gap: float, scale: float) -> float:
    """`gap / scale`, where nothing ÷ nothing is nothing."""
    return 0.0 if gap == 0 else gap / scale if scale else float("inf")


def digest(x: torch.Tensor) -> str:
    """A short text that is the same for tensors that are equal bit by bit."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
