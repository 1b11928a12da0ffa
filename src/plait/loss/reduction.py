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

from plait.comm import all_reduce, mark_announced
from plait.comm.once import first_order
from plait.errors import PlaitError
from plait.loss.labels import IS_SUM, Record, plain

TOKENS = "_plait_tokens"
"""Attribute of a loss: how many tokens, of all data ranks, it is the mean or sum of."""

WEIGHT = "_plait_weight"
"""Attribute of such a number: what the mean was divided by instead, where tokens have weights."""

OTHERS = "_plait_others"
"""Attribute of such a number: those of all losses that a model has computed in one call."""


def reduce_tokens(
    losses: Tensor,
    count: Tensor,
    reduction: str,
    record: Record,
    weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One number of the losses of tokens.

    Args:
        losses: Of every token, or element, 0 where it does not count.
        count: How many of them count, on this rank.
        reduction: "mean", "sum" or "none" (the losses as they are).
        record: The call of a model: the ranks that see other tokens, and whether this one has any.
        weight: What the mean divides by, where it is not the count.
        dtype: Of the result; None: that of `losses`.

    Returns:
        A scalar, the same on every rank of the data mesh; it remembers how many tokens it is of.

    Raises:
        PlaitError: The ranks were given different `num_items_in_batch`; on all of them.

    Comm:
        With a data mesh forward one all-reduce of five numbers; backward nothing.
    """
    has_weights = weight is not None
    weight = count if weight is None else weight
    if record.idle:
        losses = losses.masked_fill(torch.ones_like(losses, dtype=torch.bool), 0)
        if record.data_mesh is None:  # a loss outside of a model, which nobody else is part of
            loss = losses if reduction == "none" else losses.sum()
            return loss if dtype is None else loss.to(dtype)
        weight, count = torch.zeros_like(weight), torch.zeros_like(count)
    if reduction == "none":
        return losses if dtype is None else losses.to(dtype)
    dtype = losses.dtype if dtype is None else dtype
    # 16-bit numbers are added up in 32 bits and rounded once.
    total = losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()
    if record.data_mesh is not None and record.data_mesh.size() > 1:
        wide = torch.float32 if total.device.type == "mps" else torch.float64
        items = torch.zeros((), dtype=wide, device=total.device)
        if record.num_items is not None:
            items = items + plain(record.num_items)
        parts = [x.detach().to(wide) for x in (total, weight, count, items, items.square())]
        found = all_reduce(torch.stack(parts), record.data_mesh)
        _check_items(record, found[3:])
        of_all, num_ranks = found[0].to(total.dtype), record.data_mesh.size()
        total = _OfAllRanks.apply(total, of_all, num_ranks)  # type: ignore[no-untyped-call]
        weight, count = found[1], found[2].long()
    loss = total / weight.to(total.dtype) if reduction == "mean" else total
    loss = loss.to(dtype)
    loss.__dict__[TOKENS], loss.__dict__[IS_SUM] = count, reduction == "sum"
    if has_weights:
        count.__dict__[WEIGHT] = weight
    record.counts.append(count)
    return loss


def count_of_all(count: Tensor, record: Record) -> Tensor:
    """A number of labels by which a model divides a sum: that of all data ranks.

    Args:
        count: Of this rank, a scalar.
        record: The call of the model.

    Comm: with a data mesh one all-reduce of a number.
    """
    count = torch.zeros_like(count) if record.idle else count
    return count if record.data_mesh is None else all_reduce(count, record.data_mesh)


def _check_items(record: Record, sums: Tensor) -> None:
    """Refuse numbers that differ: those of a rank alone, or given by some ranks only.

    Args:
        record: Of this rank.
        sums: Of the ranks' numbers, and of their squares.
    """
    assert record.data_mesh is not None
    if record.num_items is None and not sums.is_cpu:
        return  # nothing is waited for where none was given
    size, own = record.data_mesh.size(), record.num_items
    first, second = sums.tolist()
    if abs(size * second - first * first) <= 64 * torch.finfo(sums.dtype).eps * first * first:
        return
    error = PlaitError(
        f"model(…, num_items_in_batch={own if own is None else format(float(own), 'g')}):",
        f"the {size} data ranks gave different numbers, {first:g} in all: the loss is the sum over "
        "all of them, so each has to be given the number of all",
        [
            "leave it out: the loss is then the mean over the tokens of all data ranks",
            "torch.distributed.all_reduce(n) over the data ranks before the call",
        ],
    )
    raise mark_announced(error)  # all ranks raise it


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
