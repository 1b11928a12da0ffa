"""Where in the whole tensor the parts lie that one rank holds."""

from dataclasses import dataclass

import torch

from plait.plan.intervals import ParamLayout, length
from plait.state.record import LAYOUT
from plait.weights.sharded import fsdp_shards, spans_of
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


def tp_layout(x: torch.Tensor, layout: ParamLayout | None = None) -> ParamLayout:
    """How a parameter lies on the tensor-parallel axis.

    Args:
        x: The parameter.
        layout: As `ParallelState.layouts` has it; None: what is noted on the parameter, or what its
            placement says.
    """
    noted: ParamLayout | None = layout or x.__dict__.get(LAYOUT)
    if noted is not None:
        return noted
    return layout_of_tensor("", x) if fsdp_shards(x) is None else ParamLayout(tuple(x.shape))


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
    spans = spans_of(x, layout)
    if any(length(span) == 0 for span in spans):
        return []
    if not spans:
        return [Piece((), (), ())]
    # Tensor parallelism cuts one dim in stretches, and FSDP leaves one stretch of any other.
    along = max(range(len(spans)), key=lambda dim: len(spans[dim]))
    found, position = [], 0
    for a, b in spans[along]:
        offsets = tuple(a if d == along else span[0][0] for d, span in enumerate(spans))
        sizes = tuple(b - a if d == along else s[0][1] - s[0][0] for d, s in enumerate(spans))
        local = tuple(position if d == along else 0 for d in range(len(spans)))
        found.append(Piece(offsets, sizes, local))
        position += b - a
    return found
