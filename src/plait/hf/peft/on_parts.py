"""PEFT's arithmetic on weights (merging, norms) on each rank's parts, as if they were whole.

Adding B A to a weight works on any slice of its rows or columns, if the factor on that side is
sliced alike. Inside `on_parts` the layer and its adapters hold plain tensors, this rank's parts;
what is written into them, or put in their place, is in the parameters afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait import comm
from plait.plan.intervals import ParamLayout
from plait.state import gather_whole, local_part
from plait.surgery.data_ranks import without_chunks
from plait.surgery.loading import layout_of
from plait.weights.sharded import fsdp_part, tp_axis_of, tp_rank

ROOT = "_plait_adapter_root"
"""On a wrapping layer: a weak reference to the model that was split."""

_INSIDE = "_plait_on_parts"


@contextmanager
def on_parts(layer: Any) -> Iterator[None]:
    """Inside, an adapted layer and its adapters hold plain tensors: this rank's parts.

    Args:
        layer: The wrapping layer of PEFT.

    Comm:
        Of a model that is sharded over data ranks, one all-gather of each parameter's chunks.
    """
    if layer.__dict__.get(_INSIDE):
        yield
        return
    saved: list[tuple[nn.Module, str, Any, nn.Parameter]] = []
    in_chunks(layer.__dict__[ROOT]())
    with torch.no_grad():
        for part in layer.modules():
            for name, param in part._parameters.items():
                if isinstance(param, DTensor):
                    plain = without_chunks(param, layout_of(name, param))
                    saved.append((part, name, param, nn.Parameter(plain, param.requires_grad)))
    for part, name, _, plain in saved:
        part._parameters[name] = plain
    layer.__dict__[_INSIDE] = True
    try:
        yield
    finally:
        del layer.__dict__[_INSIDE]
        for part, name, param, _ in saved:
            now = part._parameters[name]
            part._parameters[name] = param
            _write(param, now)


def in_chunks(root: nn.Module | None) -> None:
    """Let FSDP put its chunks in the place of parameters that it has gathered for a forward."""
    for part in root.modules() if is_sharded_root(root) else ():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_sharded_root(root: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether FSDP has sharded a model."""
    return isinstance(root, FSDPModule)


def _write(param: Any, now: torch.Tensor | None) -> None:
    """Put a tensor-parallel part into its parameter, where it is not the same memory."""
    local = param._local_tensor
    if now is None or now.data_ptr() == local.data_ptr():
        return
    with torch.no_grad():
        local.copy_(fsdp_part(now.detach(), param))


def is_inside(layer: Any) -> bool:
    """Whether `on_parts` is open for a layer."""
    return bool(layer.__dict__.get(_INSIDE))


def whole_value(param: Any) -> torch.Tensor:
    """The whole of a split parameter, in its own dtype, on every rank; it may share its memory.

    Comm:
        One all-gather on each axis over which it is split.
    """
    layout, axis = layout_of("", param), tp_axis_of(param)
    with torch.no_grad():
        x = without_chunks(param, layout)
        return gather_whole(x, layout, axis) if axis is not None else x


@contextmanager
def whole_weights(base: nn.Module, meshes: Sequence[DeviceMesh] = ()) -> Iterator[None]:
    """Inside, a split layer holds its own parameters whole, as one process has them.

    For what PEFT computes from a weight when it makes an adapter (norms, singular values). What is
    written into them, or put in their place, is in the parameters afterwards.

    Args:
        base: The layer.
        meshes: Axes on which the first rank's result is everybody's: it may be made of random
            numbers.

    Comm:
        One all-gather of each split parameter on each axis, and a broadcast on each of `meshes`.
        All ranks must enter.
    """
    saved: list[tuple[str, Any, ParamLayout, nn.Parameter]] = []
    for name, param in base._parameters.items():
        if isinstance(param, DTensor):
            whole = nn.Parameter(whole_value(param).clone(), param.requires_grad)
            saved.append((name, param, layout_of(name, param), whole))
    for name, _, _, whole in saved:
        base._parameters[name] = whole
    try:
        yield
    finally:
        for name, param, layout, _ in saved:
            now = base._parameters[name]
            base._parameters[name] = param
            assert now is not None
            with torch.no_grad():
                value = now.detach()
                for mesh in meshes:
                    value = comm.broadcast(value.contiguous(), mesh)
                part = local_part(value, layout, tp_rank(param))
                param._local_tensor.copy_(fsdp_part(part, param))
