"""From the losses of tokens to one number: over this rank's tokens or those of all data ranks.

A loss that is a mean over the tokens of all data ranks is a sum and a count until the last step.
The gradient of the sum is multiplied by the number of data ranks, because gradients are averaged
over these afterwards: what is left is the gradient of the mean over all tokens, whatever the number
of tokens on each rank. A rank without a token adds nothing, and takes part.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import all_reduce
from plait.comm.once import first_order

TOKENS = "_plait_tokens"
"""Attribute of a loss: how many tokens, of all data ranks, it is the mean or sum of."""


def reduce_tokens(
    losses: Tensor,
    count: Tensor,
    reduction: str,
    data_mesh: DeviceMesh | None,
    weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One number of the losses of tokens.

    Args:
        losses: Of every token, 0 where it does not count; or their sum.
        count: How many tokens count, on this rank.
        reduction: "mean" or "sum".
        data_mesh: The ranks that see other tokens; None: there are none.
        weight: What the mean divides by, where it is not the count.
        dtype: Of the result; None: that of `losses`.

    Returns:
        A scalar, the same on every rank of `data_mesh`; it remembers how many tokens it is of.

    Comm:
        With `data_mesh` forward one all-reduce of three numbers; backward nothing.
    """
    total = losses.sum()
    weight = count if weight is None else weight
    if data_mesh is not None and data_mesh.size() > 1:
        wide = torch.float32 if total.device.type == "mps" else torch.float64
        parts = torch.stack([x.detach().to(wide) for x in (total, weight, count)])
        parts = all_reduce(parts, data_mesh)
        of_all = parts[0].to(total.dtype)
        total = _OfAllRanks.apply(total, of_all, data_mesh.size())  # type: ignore[no-untyped-call]
        weight, count = parts[1], parts[2].long()
    loss = total / weight.to(total.dtype) if reduction == "mean" else total
    loss = loss.to(dtype or loss.dtype)
    loss.__dict__[TOKENS] = count
    return loss


class _OfAllRanks(Function):
    """A sum over all data ranks in place of this rank's term."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, of_all: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return of_all

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.num_ranks, None, None
