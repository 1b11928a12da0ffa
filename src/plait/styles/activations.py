"""Activations at a module's border: plain local tensors, brought from one layout to another."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plait.comm import copy_to, gather_copy, gather_from, split_to, sum_from
from plait.plan.intervals import even


def to_replicate(x: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """A module's input, whole on every rank, whose gradient on each rank is one term of a sum.

    Args:
        x: The input: plain, in the given layout, or a DTensor, in its own.
        layout: How a plain `x` lies.
        mesh: The axis.
    """
    if isinstance(x, DTensor):
        whole: torch.Tensor = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
    if isinstance(layout, Shard):
        return gather_copy(x, mesh, dim=layout.dim)
    if isinstance(layout, Partial):
        return copy_to(sum_from(x, mesh), mesh)
    return copy_to(x, mesh)


def leave_split_features(
    output: torch.Tensor,
    num_features: int | None,
    layout: Placement,
    use_local: bool,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """An output that is split on its last dim, in the layout that the next module expects.

    Args:
        output: `[..., features_local]`.
        num_features: Width of the whole last dim, needed where a DTensor leaves.
        layout: `Shard(-1)`, `Replicate()` or another `Shard(d)`.
        use_local: Whether a plain tensor leaves.
        mesh: The axis.
    """
    if isinstance(layout, Shard) and layout.dim in (-1, output.ndim - 1):
        if use_local:
            return output
        shape = (*output.shape[:-1], num_features or output.shape[-1] * mesh.size())
        return as_dtensor(output, mesh, Shard(output.ndim - 1), shape)
    output = gather_from(output, mesh, dim=-1, sizes=uneven_sizes(num_features, mesh.size()))
    shape = output.shape
    if isinstance(layout, Shard):
        output = split_to(output, mesh, dim=layout.dim)
    return output if use_local else as_dtensor(output, mesh, layout, shape)


def as_dtensor(
    x_local: torch.Tensor, mesh: DeviceMesh, layout: Placement, shape: Sequence[int]
) -> DTensor:
    """A rank's part of an activation as a DTensor, whose whole shape need not divide."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        x_local, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride
    )


@lru_cache(maxsize=1024)
def uneven_sizes(num_features: int | None, num_ranks: int) -> tuple[int, ...] | None:
    """Width on each rank, split as `torch.chunk` does; None where all are equal."""
    if num_features is None or num_features % num_ranks == 0:
        return None
    return even((num_features,), 0, num_ranks).sizes
