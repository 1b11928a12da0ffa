"""Where in the whole tensor the parts lie that one rank holds."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from plait.plan.intervals import ParamLayout, length, taken
from plait.state.record import LAYOUT
from plait.weights.slots import layout_of_tensor


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor that lies in one stretch of a rank's local tensor.

    Attributes:
        offsets: Where it starts in the whole tensor.
        sizes: Its extent.
        local_offsets: Where it starts in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The piece, as a view of the rank's local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def fsdp_shard(x: torch.Tensor) -> tuple[int, int, int] | None:
    """Along which dim FSDP cuts a parameter's tensor-parallel part: `(dim, rank, num_ranks)`.

    None where the parameter is no DTensor, or is cut by tensor parallelism alone. Axes that hold
    copies do not count.
    """
    if not isinstance(x, DTensor):
        return None
    names = x.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard | _StridedShard) and axis < len(names):
            mesh = x.device_mesh
            if names[axis] != "tp" and (mesh.ndim > 1 or _is_data_axis(names[axis])):
                return placement.dim, mesh.get_local_rank(axis), mesh.size(axis)
    return None


def _is_data_axis(name: str) -> bool:
    return name.startswith(("dp", "cp", "sp", "fsdp"))


def tp_layout(x: torch.Tensor, layout: ParamLayout | None = None) -> ParamLayout:
    """How a parameter lies on the tensor-parallel axis.

    Args:
        x: The parameter.
        layout: As `ParallelState.layouts` has it; None: what is noted on the parameter, or what its
            placement says.
    """
    layout = layout or x.__dict__.get(LAYOUT)
    if layout is None:
        alone = fsdp_shard(x) is None
        layout = layout_of_tensor("", x) if alone else ParamLayout(tuple(x.shape))
    return layout


def pieces_of(x: torch.Tensor, layout: ParamLayout | None = None) -> list[Piece]:
    """The pieces of the whole tensor that this rank holds, in the order of its local tensor.

    Args:
        x: A parameter, or another tensor placed as one (a gradient, an optimizer's state).
        layout: How it lies on the tensor-parallel axis, as `ParallelState.layouts` has it; None:
            what is noted on the parameter, or what its placement says.

    Returns:
        One piece for each stretch; none where this rank holds nothing. Ranks that hold copies get
        equal pieces.
    """
    layout = tp_layout(x, layout)
    shape = layout.shape
    spans: list[tuple[tuple[int, int], ...]] = [((0, size),) for size in shape]
    if layout.dim is not None:
        spans[layout.dim] = layout.pieces[tp_rank(x)]
    cut = fsdp_shard(x)
    if cut is not None:
        dim, rank, num_ranks = cut
        start, stop = fsdp_range(length(spans[dim]), rank, num_ranks)
        spans[dim] = taken(spans[dim], ((start, stop),))
    along = next((d for d, span in enumerate(spans) if len(span) != 1), None)
    if any(length(span) == 0 for span in spans):
        return []
    split = [d for d, span in enumerate(spans) if span != ((0, shape[d]),)]
    along = along if along is not None else (split[0] if split else 0)
    if not shape:
        return [Piece((), (), ())]
    found, position = [], 0
    for a, b in spans[along]:
        offsets = tuple(a if d == along else span[0][0] for d, span in enumerate(spans))
        sizes = tuple(b - a if d == along else s[0][1] - s[0][0] for d, s in enumerate(spans))
        local = tuple(position if d == along else 0 for d in range(len(shape)))
        found.append(Piece(offsets, sizes, local))
        position += b - a
    return found


def fsdp_range(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The indices of a dim of `size` that one rank holds: cut as `torch.chunk` does."""
    step = -(-size // num_ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def tp_rank(x: torch.Tensor) -> int:
    """This rank's place on the tensor-parallel axis of a parameter."""
    if not isinstance(x, DTensor):
        return 0
    mesh = x.device_mesh
    if mesh.ndim == 1:
        return mesh.get_local_rank() if fsdp_shard(x) is None else 0
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank("tp") if "tp" in names else 0
