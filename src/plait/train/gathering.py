"""Numbers of all data ranks: nested tensors gathered and reduced, each tensor-parallel group once.

The ranks of a tensor-parallel group hold the same numbers, so they are counted as one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import PlaitError
from plait.train.batches import map_tensors

REDUCTIONS = ("sum", "mean", "none")
"""What `reduce` can do."""


def gather(data: Any, data_mesh: DeviceMesh | None) -> Any:
    """Every data rank's rows, in rank order.

    Args:
        data: Nested tensors; a number becomes one row. Lengths along dim 0 may differ.
        data_mesh: The ranks that see other samples; None: there is only one.

    Returns:
        The same containers; tensors without gradients, `[rows of all ranks, …]`.

    Comm: one all-gather for each tensor.
    """

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        x = x.reshape(1) if x.ndim == 0 else x
        if data_mesh is None:
            return x
        wide = x.to(torch.uint8) if x.dtype is torch.bool else x
        return comm.all_gather(wide.contiguous(), data_mesh, dim=0).to(x.dtype)

    return map_tensors(one, data)


def reduce(
    data: Any, data_mesh: DeviceMesh | None, reduction: str = "sum", scale: float = 1.0
) -> Any:
    """The sum or mean over the data ranks of nested tensors.

    Args:
        data: Nested tensors of the same shapes on all ranks.
        data_mesh: The ranks that see other samples; None: there is only one.
        reduction: "sum", "mean" or "none".
        scale: The result is multiplied by it.

    Raises:
        PlaitError: There is no such reduction.

    Comm: one all-reduce for each tensor.
    """
    if reduction not in REDUCTIONS:
        raise PlaitError(
            f"reduce(…, reduction={reduction!r}):",
            f"it is none of {', '.join(map(repr, REDUCTIONS))}",
            "reduction='mean'",
        )

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        if data_mesh is not None and reduction != "none":
            x = comm.all_reduce(x.clone(), data_mesh)
            x = x / data_mesh.size() if reduction == "mean" else x
        return x if scale == 1.0 else x * scale

    return map_tensors(one, data)


def pad_across(
    data: Any,
    data_mesh: DeviceMesh | None,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
) -> Any:
    """Nested tensors filled up along one dim to the longest of all data ranks.

    Args:
        data: Nested tensors.
        data_mesh: The ranks that see other samples; None: there is only one.
        dim: Which dim; tensors that have fewer are left.
        pad_index: What to fill with.
        pad_first: Fill at the front.

    Comm: one control message for each tensor.
    """

    def one(x: torch.Tensor) -> torch.Tensor:
        if data_mesh is None or not -x.ndim <= dim < x.ndim:
            return x
        longest = max(comm.exchange(x.shape[dim], data_mesh))
        shape = list(x.shape)
        shape[dim] = longest - x.shape[dim]
        filling = x.new_full(shape, pad_index)
        return torch.cat([filling, x] if pad_first else [x, filling], dim=dim)

    return map_tensors(one, data)


def own_part(items: Any, rank: int, num_ranks: int, fill: bool = False) -> Any:
    """One data rank's part of a list, a tensor, or a dict of them; parts differ by one at most.

    Args:
        items: The same on all ranks.
        rank: This data rank.
        num_ranks: How many there are.
        fill: Repeat the last item so that all parts are as long.
    """
    if isinstance(items, dict):
        return {key: own_part(value, rank, num_ranks, fill) for key, value in items.items()}
    least, more = divmod(len(items), num_ranks)
    start = rank * least + min(rank, more)
    part = items[start : start + least + (rank < more)]
    if fill and more and rank >= more:
        part = _with_one_more(part, items[-1:])
    return part


def _with_one_more(part: Any, last: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.cat([part, last])
    return [*part, *last] if isinstance(part, list) else type(part)([*part, *last])


def first_of_columns(objects: Sequence[Any]) -> list[Any]:
    """Objects of all data ranks as one list; lists are joined."""
    if all(isinstance(obj, list) for obj in objects):
        return [item for obj in objects for item in obj]
    return list(objects)
