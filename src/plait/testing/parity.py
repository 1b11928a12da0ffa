"""Is the split model the same as the whole one? Outputs, loss and every gradient.

Correct tensor parallelism in float64 differs from one process by rounding, about 1e-15 of a
tensor's largest value; the tolerance of 1e-11 leaves room for longer sums and none for mistakes.
Many models compute norms, softmax and loss in float32 whatever their dtype is, which would add
1e-7; [`exact`][plait.proof.numbers.exact] keeps them in float64.

[`plait.proof`][plait.proof] compares module by module and says which one is to blame.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.proof.numbers import FLOOR, difference, exact, loss_of, tensors

__all__ = ["TOLERANCES", "Comparison", "compare", "exact"]

TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""Largest difference, as a fraction of the tensor's largest value, by dtype."""


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
    its tensors serves, so that a gradient that is merely scaled or permuted is noticed.

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
        found.outputs[name] = difference(split[name], whole[name])
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
            found.grads[name] = difference(split_grads[name], whole_grads[name], largest * FLOOR)
    problems += _beyond(found, limit)
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} difference(s):", *problems]))
    return found


def _run(model: nn.Module, batch: Mapping[str, Any], grads: bool) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(grads):
        outputs = dict(_tensors(model(**batch)))
        if grads:
            loss_of(outputs).backward()
    return {name: x.detach() for name, x in outputs.items()}


def _tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model's output but those of caches, whole."""
    for name, x in tensors(output):
        yield name, x.full_tensor() if isinstance(x, DTensor) else x


def _missing(what: str, split: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    lines = [f"  {what} {name}: missing in the split model" for name in whole if name not in split]
    return lines + [f"  {what} {name}: only in the split model" for name in split.keys() - whole]


def _beyond(found: Comparison, limit: float) -> list[str]:
    named = [("output", *item) for item in found.outputs.items()]
    named += [("gradient", *item) for item in found.grads.items()]
    wrong = sorted((item for item in named if not item[2] <= limit), key=lambda item: -item[2])
    return [f"  {what} {name}: off by {gap:.1e}, allowed {limit:.0e}" for what, name, gap in wrong]
