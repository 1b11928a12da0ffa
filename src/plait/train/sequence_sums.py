"""Sums over whole sequences of which each rank holds some tokens, for losses made of them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import all_reduce
from plait.comm.once import first_order
from plait.errors import PlaitError
from plait.train.sequences import axes_of


def sequence_sum(x: Tensor, where: Any) -> Tensor:
    """The sum of a number for each token over each whole sequence, on all ranks that share it.

    For losses of sequences (preferences, rewards, classes) in the place of `x.sum(1)`:

    ```python
    logps = plait.sequence_sum(token_logps * mask, model)  # [batch]
    loss = -torch.nn.functional.logsigmoid(logps[0] - logps[1])
    ```

    Args:
        x: `[batch, seq_local, …]`, of this rank's tokens; 0 where one is not to count.
        where: The ranks that share the sequences: a split model, an `Accelerator`, or as `axes_of`.

    Returns:
        `[batch, …]`, the same on all these ranks. Where each of them computes the same loss of
        it, gradients of parameters are those of one process: they are averaged over the ranks, and
        the backward here adds the ranks' gradients up.

    Raises:
        LayoutError: Nobody shares sequences there.
        PlaitError: `x` has less than two dims.

    Comm: one all-reduce of the result, and one in the backward.
    """
    axes = axes_of(where)
    if x.ndim < 2:
        raise PlaitError(
            f"sequence_sum of {tuple(x.shape)}:",
            "it has no dim of tokens",
            "one number for each token: [batch, seq_local]",
        )
    total: Tensor = _Sum.apply(x.sum(1), axes.both)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """All-reduce forward and backward: each rank's loss depends on each rank's term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return all_reduce(x, mesh)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.mesh), None
