"""The whole tensors behind the split ones."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.comm import all_gather
from plait.plan.intervals import ParamLayout
from plait.state.record import LAYOUT, state_of
from plait.styles.quantized import is_quantized, joined, taken
from plait.weights.module_store import in_order
from plait.weights.sharded import tp_axis_of, without_fsdp


def gather_whole(x_local: torch.Tensor, layout: ParamLayout, mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor on every rank, in its original order.

    Args:
        x_local: This rank's part, `layout.local_shape(rank)`.
        layout: Which index ranges each rank holds.
        mesh: The axis.

    Returns:
        The tensor of shape `layout.shape`.

    Comm:
        One all-gather of the tensor, where it is split at all.
    """
    if layout.dim is None:
        return x_local
    if is_quantized(x_local):
        return joined(x_local, layout, lambda part, own: gather_whole(part, own, mesh))
    gathered = all_gather(x_local.contiguous(), mesh, dim=layout.dim, sizes=layout.sizes)
    return in_order(gathered, layout)


def local_part(x: torch.Tensor, layout: ParamLayout, rank: int) -> torch.Tensor:
    """What one rank holds of a whole tensor; the inverse of `gather_whole`.

    Args:
        x: The tensor of shape `layout.shape`.
        layout: Which index ranges each rank holds.
        rank: The rank's place on the axis.

    Returns:
        A copy of shape `layout.local_shape(rank)`.
    """
    if layout.dim is None:
        return x.clone()
    dim = layout.dim
    if is_quantized(x):
        return taken(x, dim, layout.pieces[rank])
    parts = [x.narrow(dim, a, b - a) for a, b in layout.pieces[rank]]
    return torch.cat(parts, dim=dim) if parts else x.narrow(dim, 0, 0).clone()


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole, on the CPU of every rank.

    Args:
        module: A module that `parallelize` has split, or any other.

    Returns:
        Name → tensor, with the names and shapes of the unsplit module. Tied tensors appear under
        each of their names, sharing storage.

    Comm:
        One all-gather for each split parameter. All ranks of the axis must call it.
    """
    return dict(_whole_tensors(module, module.state_dict(keep_vars=True), lambda x: x))


def full_grads(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that has one, whole, on the CPU of every rank.

    Args:
        module: A module that `parallelize` has split, or any other, after a backward pass.

    Returns:
        Name → gradient, with the names and shapes of the unsplit module; a tied parameter once.

    Comm:
        One all-gather for each split parameter. All ranks of the axis must call it.
    """
    params = {n: p for n, p in module.named_parameters() if p.grad is not None}
    return dict(_whole_tensors(module, params, lambda x: x.grad))


def whole_like(
    x: torch.Tensor, param: torch.Tensor, layout: ParamLayout | None = None
) -> torch.Tensor:
    """The whole of a tensor that is placed as a parameter is, such as an optimizer's state.

    Args:
        x: This rank's part of it.
        param: The parameter.
        layout: As `ParallelState.layouts` has it; None: what is noted on the parameter.

    Returns:
        The tensor, of the parameter's whole shape.

    Comm: one all-gather where it is split. All ranks must call it.
    """
    if not isinstance(x, DTensor):
        return x
    layout = param.__dict__.get(LAYOUT) or layout
    return x.full_tensor() if layout is None else _whole(x, layout)


def held_fraction(module: nn.Module) -> float:
    """Parameter elements that this rank holds ÷ all of the module's; a tied parameter counts once.

    Comm: none.
    """
    held = total = 0
    for param in module.parameters():
        total += param.numel()
        held += param._local_tensor.numel() if isinstance(param, DTensor) else param.numel()
    return held / total if total else 1.0


def _whole(x: DTensor, layout: ParamLayout) -> torch.Tensor:
    """The whole of a tensor that FSDP and tensor parallelism have cut."""
    axis = tp_axis_of(x)
    x_tp = without_fsdp(x, layout)
    return x_tp if axis is None else gather_whole(x_tp, layout, axis)


def _whole_tensors(
    module: nn.Module,
    tensors: Mapping[str, Any],
    pick: Callable[[torch.Tensor], torch.Tensor | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    state = state_of(module)
    done: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            x = pick(tensor) if isinstance(tensor, torch.Tensor) else None
            if x is None:  # no gradient, or extra state that is no tensor
                continue
            if id(tensor) not in done:
                if isinstance(x, DTensor):
                    layout = tensor.__dict__.get(LAYOUT)
                    if layout is None and state is not None:
                        layout = state.layouts.get(name)
                    x = x.full_tensor() if layout is None else _whole(x, layout)
                done[id(tensor)] = x.detach().cpu().clone()
            yield name, done[id(tensor)]
