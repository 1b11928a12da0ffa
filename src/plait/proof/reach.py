"""What a batch has not reached of a split model: a comparison says nothing about it."""

from collections.abc import Iterable

from torch import nn

from plait.plan.rules import generalize
from plait.proof.runs import Run


def not_reached(whole: nn.Module, run: Run, rules: Iterable[str]) -> tuple[str, ...]:
    """The rules that name modules no call has reached, and parameters no gradient has.

    A module whose parameters have got a gradient is reached without a call, and a frozen parameter
    by a call of its module.

    Args:
        whole: The whole model, with the gradients of its run.
        run: That run.
        rules: Patterns of the plan. A pattern is reached where one of the layers that it names is,
            and one that names nothing is left out.

    Returns:
        Patterns, with `*` for every number, in the order of the model.
    """
    called = {key.module for key in run.record.tensors} | set(run.record.callers)
    wanted = {generalize(pattern) for pattern in rules}
    reached: dict[str, bool] = {}
    for name, module in whole.named_modules():
        pattern = generalize(name)
        if pattern in wanted and not reached.get(pattern):
            graded = any(p.grad is not None for p in module.parameters())
            reached[pattern] = name in called or graded
    for name, param in whole.named_parameters(remove_duplicate=False):
        pattern = generalize(name)
        if pattern in wanted and not reached.get(pattern):
            frozen = not param.requires_grad and name.rpartition(".")[0] in called
            reached[pattern] = param.grad is not None or frozen
    return tuple(pattern for pattern, was in reached.items() if not was)
