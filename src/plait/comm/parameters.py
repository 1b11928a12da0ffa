"""From a DTensor parameter to its local tensor and back with the gradient, without dispatch."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.comm import raw
from plait.comm.once import first_order
from plait.comm.ownership import counts_of_new, holders
from plait.comm.pairs import copy_to
from plait.errors import RankError


class _Local(Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor, sum_over: DeviceMesh | None) -> Tensor:
        ctx.spec = param._spec
        ctx.strides = param._local_tensor.stride()
        ctx.sum_over = sum_over
        ctx.counts_of_new = counts_of_new()
        # A new object: autograd writes its record into it, and _local_tensor must stay clean.
        return param._local_tensor.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With the parameter's own strides autograd keeps this very tensor as .grad, and adds to it
        # later.
        is_new = type(grad) is Tensor and holders(grad) in ctx.counts_of_new
        if ctx.sum_over is not None:
            total = raw.all_reduce(grad, ctx.sum_over)
            is_new = is_new or total is not grad
            grad = total
        if not is_new or grad.stride() != ctx.strides:
            grad = _copied(grad, ctx.strides)
        # The gradient shares the parameter's description: DTensor never modifies one in place.
        return DTensor(grad, ctx.spec, requires_grad=False), None


def _copied(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A gradient in memory of its own, laid out as the parameter."""
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def local(
    param: Tensor, grad: Literal["own", "sum"] = "own", mesh: DeviceMesh | None = None
) -> Tensor:
    """The local tensor of a parameter, with a gradient that finds its way back.

    Args:
        param: A DTensor (as a rule an `nn.Parameter` holding one). A plain tensor is its own
            local tensor.
        grad: "own": each rank's gradient is that of its own piece. "sum": the ranks' gradients are
            terms of one gradient and are added over the axis first, for a parameter that every
            rank holds whole and uses differently.
        mesh: The axis to add over; by default the parameter's own mesh, which then has one axis.

    Returns:
        The local tensor, not a copy. Where no gradient is recorded, the very `_local_tensor`.

    Raises:
        RankError: "sum" without an axis to add over.

    Comm:
        Forward nothing. Backward nothing for "own", one all-reduce of the local bytes for "sum".
    """
    if not isinstance(param, DTensor):
        if grad == "own":
            return param
        return copy_to(param, _axis(param, mesh))
    if torch.compiler.is_compiling():
        local_tensor = param.to_local()
        return local_tensor if grad == "own" else copy_to(local_tensor, _axis(param, mesh))
    if not (param.requires_grad and torch.is_grad_enabled()):
        return param._local_tensor
    sum_over = None
    if grad == "sum":
        axis = _axis(param, mesh)
        sum_over = axis if raw.mesh_size(axis) > 1 else None
    out: Tensor = _Local.apply(param, sum_over)  # type: ignore[no-untyped-call]
    return out


def _axis(param: Tensor, mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None and isinstance(param, DTensor):
        mesh = param.device_mesh
        if param.ndim == 0 and mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]  # whole on the other axes, whose sums are FSDP's
    if mesh is None or mesh.ndim != 1:
        raise RankError(
            f"the gradient of a parameter {tuple(param.shape)} summed over an axis",
            "the parameter is not a DTensor"
            if mesh is None
            else f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}",
            "name the axis: comm.local(param, grad='sum', mesh=tp_mesh)",
        )
    return mesh
