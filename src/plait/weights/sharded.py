"""How a parameter lies on the axes around tensor parallelism: FSDP cuts each rank's part once more.

FSDP2 cuts the local tensor of a tensor-parallel rank in equal chunks along one dim (dim 0 unless
told otherwise), as `torch.chunk` does.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait.plan.intervals import ParamLayout, Pieces, joined, length, taken
from plait.run.torch_private import StridedShard

_DATA_AXES = ("dp", "fsdp", "cp", "sp")


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the first of a mesh; of one process, always."""
    return mesh is None or not any(mesh.get_coordinate() or ())


class Shards(NamedTuple):
    """The cut that FSDP makes of a parameter: along `dim`, rank `rank` of `num_ranks` of `axis`."""

    dim: int
    rank: int
    num_ranks: int
    axis: str

    def range_of(self, size: int) -> tuple[int, int]:
        """The indices of a dim of `size` that this rank holds."""
        step = -(-size // self.num_ranks)
        return min(self.rank * step, size), min((self.rank + 1) * step, size)

    def sizes_of(self, size: int) -> list[int]:
        """How many indices of a dim of `size` each rank holds."""
        ranges = [self._replace(rank=r).range_of(size) for r in range(self.num_ranks)]
        return [stop - start for start, stop in ranges]


def fsdp_shards(x: Tensor) -> Shards | None:
    """The cut that FSDP makes of a parameter; None where it makes none.

    Args:
        x: A parameter, or a tensor placed as one. Axes that hold copies do not count.
    """
    if not isinstance(x, DTensor):
        return None
    mesh = x.device_mesh
    names = mesh.mesh_dim_names or ()
    for axis, (name, placement) in enumerate(zip(names, x.placements, strict=False)):
        is_data = name != "tp" and (mesh.ndim > 1 or name.startswith(_DATA_AXES))
        if is_data and isinstance(placement, Shard | StridedShard):
            return Shards(placement.dim, mesh.get_local_rank(axis), mesh.size(axis), name)
    return None


def tp_rank(x: Tensor) -> int:
    """This rank's place on the tensor-parallel axis of a parameter; 0 where it has none."""
    axis = tp_axis_of(x)
    return 0 if axis is None else axis.get_local_rank()


def tp_axis_of(x: Tensor) -> DeviceMesh | None:
    """The tensor-parallel axis that a parameter lies on, if any."""
    if not isinstance(x, DTensor):
        return None
    mesh = x.device_mesh
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return None if names and names[0].startswith(_DATA_AXES) else mesh
    return mesh["tp"] if "tp" in names else None


def spans_of(x: Tensor, layout: ParamLayout) -> tuple[Pieces, ...]:
    """The index ranges along each dim of the whole tensor that this rank holds.

    Args:
        x: The parameter.
        layout: How it lies on the tensor-parallel axis.
    """
    spans: list[Pieces] = [((0, size),) for size in layout.shape]
    if layout.dim is not None:
        spans[layout.dim] = joined(layout.pieces[tp_rank(x)])
    cut = fsdp_shards(x)
    if cut is not None:
        spans[cut.dim] = taken(spans[cut.dim], (cut.range_of(length(spans[cut.dim])),))
    return tuple(spans)


def fsdp_part(x_tp: Tensor, like: Tensor) -> Tensor:
    """This rank's chunk of its tensor-parallel part, a view; `x_tp` where FSDP cuts nothing."""
    cut = fsdp_shards(like)
    if cut is None:
        return x_tp
    start, stop = cut.range_of(x_tp.shape[cut.dim])
    return x_tp.narrow(cut.dim, start, stop - start)


def without_fsdp(x: Tensor, layout: ParamLayout) -> Tensor:
    """The tensor-parallel part of a parameter, put together from the chunks of FSDP.

    Args:
        x: The parameter, or a tensor placed as one.
        layout: How it lies on the tensor-parallel axis.

    Returns:
        The local tensor of shape `layout.local_shape(tp_rank(x))`.

    Comm:
        One all-gather over the FSDP axis, where it is cut.
    """
    from plait import comm

    local = x._local_tensor if isinstance(x, DTensor) else x
    cut = fsdp_shards(x)
    if cut is None:
        return local
    assert isinstance(x, DTensor)
    mesh = x.device_mesh if x.device_mesh.ndim == 1 else x.device_mesh[cut.axis]
    size = layout.local_shape(tp_rank(x))[cut.dim]
    with torch.no_grad():
        return comm.all_gather(local.contiguous(), mesh, cut.dim, sizes=cut.sizes_of(size))
