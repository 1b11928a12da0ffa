"""A gathered value that some use alike on every rank and others each in its own way.

Between tensor-parallel regions a rank holds its tokens only. A region begins with a gather. What is
computed whole on every rank gives the gathered value the same gradient everywhere, which is cut
again in the backward; the column-parallel layers each give it a term, and the terms are summed and
cut at once. Both have one gather in the forward.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), section 4.2.2: g and its conjugate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import raw
from plait.comm.border import keep_border
from plait.comm.group import group_of
from plait.comm.once import first_order
from plait.comm.pairs import Sizes, gather_from


class _Terms(Function):
    """The gathered value for those who use it differently. Partner: scatter_sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes
    ) -> Tensor:
        ctx.args = mesh, dim, sizes
        same_memory = whole.detach()
        return same_memory.view_as(same_memory)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw.reduce_scatter(grad, *ctx.args), None, None, None, None


def gather_for(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes) -> Tensor:
    """Join the ranks' pieces to a whole for a region of the model that is split over the ranks.

    Used as it is, the result is that of [`gather_from`][plait.comm.gather_from]; what
    [`copy_to`][plait.comm.copy_to] makes of it is that of [`gather_copy`][plait.comm.gather_copy]
    of the pieces, in the same memory, and so with a reshaped view of it. So column-parallel layers
    find their border in it, and one reduce-scatter stands for the all-reduce of all of them.

    Args:
        x: This rank's piece.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension the pieces lie along.
        sizes: Extent along `dim` of every rank's piece.

    Returns:
        The whole, `sum(sizes)` long along `dim`.

    Comm:
        Forward one all-gather of the whole's bytes. Backward one reduce-scatter of the same bytes,
        where `copy_to` was used.
    """
    whole = gather_from(x, mesh, dim, sizes)
    if x.requires_grad and torch.is_grad_enabled() and raw.mesh_size(mesh) > 1:
        terms = _Terms.apply(x, whole.detach(), mesh, dim, sizes)  # type: ignore[no-untyped-call]
        keep_border(whole, group_of(mesh), terms, serves_views=True)
    return whole
