"""From a DTensor parameter to its local tensor and back with the gradient, without dispatch."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.comm import raw


class _Local(Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor, sum_over: DeviceMesh | None) -> Tensor:
        ctx.spec = param._spec
        ctx.sum_over = sum_over
        # A new object: autograd writes its record into it, and _local_tensor must stay clean.
        return param._local_tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.sum_over is not None:
            grad = raw.all_reduce(grad, ctx.sum_over)
        # The gradient takes the parameter's own description; specs are never modified in place.
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False), None


def local(
    param: Tensor, grad: Literal["own", "sum"] = "own", mesh: DeviceMesh | None = None
) -> Tensor:
    """The local tensor of a parameter, with a gradient that finds its way back.

    Args:
        param: A DTensor (as a rule an `nn.Parameter` holding one).
        grad: "own": each rank's gradient is that of its own piece. "sum": the ranks' gradients are
            terms of one gradient and are added over the axis first, for a parameter that every
            rank holds whole and uses differently.
        mesh: The axis to add over; the parameter's own mesh where that has one axis.

    Returns:
        The local tensor, not a copy. Where no gradient is recorded, the very `_local_tensor`.

    Comm:
        Forward nothing. Backward nothing for "own", one all-reduce of the local bytes for "sum".
    """
    assert isinstance(param, DTensor)
    if not (param.requires_grad and torch.is_grad_enabled()):
        return param._local_tensor
    sum_over = None
    if grad == "sum":
        sum_over = param.device_mesh if mesh is None else mesh
    out: Tensor = _Local.apply(param, sum_over)  # type: ignore[no-untyped-call]
    return out
