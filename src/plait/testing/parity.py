"""Is the split model the same as the whole one? Outputs, loss and every gradient.

Correct tensor parallelism in float64 differs from one process by rounding, about 1e-15 of a
tensor's largest value; the tolerance of 1e-11 leaves room for longer sums and none for mistakes.
Many models compute norms, softmax and loss in float32 whatever their dtype is, which would add
1e-7; [`exact`][plait.testing.parity.exact] keeps them in float64.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""Largest difference, as a fraction of the tensor's largest value, by dtype."""

_FLOOR = 1e-4
"""A gradient's scale is at least this fraction of the largest gradient: some gradients are zero but
for rounding (a key bias cannot move a softmax), and have no scale of their own."""


@dataclass
class Comparison:
    """What `compare` found: the largest relative difference of each tensor.

    Args:
        outputs: By name: "logits", "loss", or the position in a tuple.
        grads: By parameter name; empty when gradients were not asked for.
        num_compared: Number of tensors compared, so that a test can ask for all of them.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    grads: dict[str, float] = field(default_factory=dict)

    @property
    def num_compared(self) -> int:
        """Number of tensors compared."""
        return len(self.outputs) + len(self.grads)

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max([*self.outputs.values(), *self.grads.values()], default=0.0)


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


def compare(
    model_split: nn.Module,
    model_whole: nn.Module,
    batch: Mapping[str, Any],
    *,
    grads: bool = True,
    tolerance: float | None = None,
) -> Comparison:
    """Assert that two models agree on outputs, loss and the gradient of every parameter.

    Float64 models run under `exact`. Where the output has no `loss`, a fixed random weighting of
    its first tensor serves, so that a gradient that is merely scaled or permuted is noticed.

    Args:
        model_split: The model split by plait; its gradients are read with `plait.full_grads`.
        model_whole: The same model, whole, on every rank.
        batch: Keyword arguments of both forwards, the same on all ranks.
        grads: Whether to run backward and compare gradients. Existing ones are cleared.
        tolerance: Largest difference as a fraction of a tensor's largest value; None chooses by
            the dtype of the whole model's parameters.

    Returns:
        The differences found, all within the tolerance.

    Raises:
        AssertionError: Names every tensor that differs, the worst first.

    Comm: those of the split model's forward and backward, and of `full_grads`.
    """
    dtype = next(model_whole.parameters()).dtype
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    found = Comparison()
    with exact() if dtype == torch.float64 else contextlib.nullcontext():
        split, whole = _run(model_split, batch, grads), _run(model_whole, batch, grads)
    problems = _missing("output", split, whole)
    for name in whole.keys() & split.keys():
        found.outputs[name] = _difference(split[name], whole[name])
    if grads:
        import plait

        split_grads = dict(plait.full_grads(model_split))
        # A parameter that the loss does not reach has no gradient, or a zero one.
        whole_grads = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in model_whole.named_parameters()
            if x.grad is not None or name in split_grads
        }
        problems += _missing("gradient", split_grads, whole_grads)
        largest = max((float(g.abs().max()) for g in whole_grads.values()), default=0.0)
        for name in whole_grads.keys() & split_grads.keys():
            found.grads[name] = _difference(split_grads[name], whole_grads[name], largest * _FLOOR)
    problems += _beyond(found, limit)
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} difference(s):", *problems]))
    return found


def _run(model: nn.Module, batch: Mapping[str, Any], grads: bool) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(grads):
        outputs = dict(_tensors(model(**batch)))
        if grads:
            loss = outputs.get("loss")
            (_weighted(next(iter(outputs.values()))) if loss is None else loss).backward()
    return {name: x.detach() for name, x in outputs.items()}


def _weighted(x: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    return (x * weights.to(x.dtype).to(x.device)).sum()


def _tensors(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model's output but those of caches."""
    if isinstance(output, torch.Tensor):
        whole = output.full_tensor() if hasattr(output, "full_tensor") else output
        yield prefix or "output", whole
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name != "past_key_values":
                yield from _tensors(value, f"{prefix}.{name}".lstrip("."))
    elif isinstance(output, tuple | list):
        for number, value in enumerate(output):
            yield from _tensors(value, f"{prefix}[{number}]")


def _missing(what: str, split: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    lines = [f"  {what} {name}: missing in the split model" for name in whole if name not in split]
    return lines + [f"  {what} {name}: only in the split model" for name in split.keys() - whole]


def _difference(split: torch.Tensor, whole: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference ÷ the tensor's scale; infinite for other shapes or for NaN."""
    if split.shape != whole.shape:
        return float("inf")
    if whole.numel() == 0:
        return 0.0
    a, b = split.detach().cpu().double(), whole.detach().cpu().double()
    gap, scale = float((a - b).abs().max()), max(float(b.abs().max()), floor)
    if gap != gap:
        return float("inf")
    return 0.0 if gap == 0 else gap / scale if scale else float("inf")


def _beyond(found: Comparison, limit: float) -> list[str]:
    named = [("output", *item) for item in found.outputs.items()]
    named += [("gradient", *item) for item in found.grads.items()]
    wrong = sorted((item for item in named if not item[2] <= limit), key=lambda item: -item[2])
    return [f"  {what} {name}: off by {gap:.1e}, allowed {limit:.0e}" for what, name, gap in wrong]
