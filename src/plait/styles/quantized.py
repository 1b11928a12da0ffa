"""Quantized weights cut over ranks, their scales with them.

Two forms are known. A tensor of torchao holds its numbers, scales and zero points in tensors of its
own, with one scale for each block of elements. A layer of transformers with fine-grained float8
weights holds the scales of its blocks in a second parameter. Either way a rank's part must consist
of whole blocks.

Quantized weights are not trained; gradients reach the layer's input where the layer's own kernel
has a backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from plait.errors import PlanError, WeightsError
from plait.plan.intervals import ParamLayout, Pieces, even, length
from plait.run import torch_private

SCALES = "weight_scale_inv"
"""The parameter of a float8 layer that holds a scale for each block of its weight."""

_BLOCK = "_plait_block"  # on a rank's part: how many elements along the cut dim share a scale


def is_quantized(x: Any) -> bool:
    """Whether a tensor is one of torchao's."""
    return hasattr(x, "tensor_data_names") and hasattr(x, "dequantize")


def has_block_scales(module: nn.Module) -> bool:
    """Whether a layer's weight has its scales in a parameter beside it."""
    return module._parameters.get(SCALES) is not None


def refuse_quantized(module: nn.Module, asked: str, way: str) -> None:
    """Refuse what cannot be done with a module that holds torchao's tensors.

    Args:
        module: The module, split or not.
        asked: What was asked for.
        way: The way out.

    Raises:
        WeightsError: It holds one.
    """
    for name, param in module.named_parameters():
        local: Any = param._local_tensor if isinstance(param, DTensor) else param
        if is_quantized(local):
            raise WeightsError(asked, f"{name} is quantized ({type(local).__name__})", way)


def _data(x: Any) -> dict[str, torch.Tensor]:
    names, _ = x.__tensor_flatten__()
    return {name: getattr(x, name) for name in names}


def _blocks(x: Any, dim: int) -> int:
    """Elements along a dim that share a scale; 1: each has its own, or all have one."""
    found = 1
    for part in _data(x).values():
        size = part.shape[dim] if part.ndim == x.ndim else 1
        if 1 < size < x.shape[dim]:
            found = max(found, -(-x.shape[dim] // size))
    return found


def _rebuilt(
    x: Any, change: Callable[[torch.Tensor], torch.Tensor], shape: Any, grows: bool = True
) -> Any:
    """A tensor as `x` of other data.

    Args:
        x: The tensor.
        change: What each of its data tensors becomes.
        shape: Of the whole.
        grows: Whether a block as wide as `x` is as wide as the whole.
    """
    parts = {name: change(part) for name, part in _data(x).items()}
    _, context = x.__tensor_flatten__()
    block = getattr(x, "block_size", None)
    if block is not None and grows:
        pairs = enumerate(block)
        now = [shape[dim] if size == x.shape[dim] else size for dim, size in pairs]
        context = {**context, "block_size": type(block)(now)}
    return type(x).__tensor_unflatten__(parts, context, torch.Size(shape), None)


def changed(x: Any, dim: int, change: Callable[[torch.Tensor], torch.Tensor], shape: Any) -> Any:
    """A torchao tensor whose rows along `dim`, each with scales of its own, are others.

    Args:
        x: The tensor.
        dim: The dim.
        change: What becomes of each data tensor that has an entry for every row.
        shape: Of the result.
    """

    def own(part: torch.Tensor) -> torch.Tensor:
        has_rows = part.ndim == x.ndim and part.shape[dim] == x.shape[dim]
        return change(part) if has_rows else part

    return _rebuilt(x, own, shape)


def _in_blocks(pieces: Pieces, block: int) -> Pieces:
    return tuple((a // block, -(-b // block)) for a, b in pieces)


def taken(x: Any, dim: int, pieces: Pieces) -> Any:
    """The ranges `pieces` of a torchao tensor along `dim`, one after another.

    Args:
        x: The tensor.
        dim: The dim.
        pieces: Ranges that begin and end with blocks.
    """
    whole, shape = x.shape[dim], list(x.shape)
    shape[dim] = length(pieces)

    def change(part: torch.Tensor) -> torch.Tensor:
        if part.ndim != x.ndim or part.shape[dim] == 1 < whole:
            return part
        found = _in_blocks(pieces, -(-whole // part.shape[dim]))
        rows = [part.narrow(dim, a, b - a) for a, b in found]
        return torch.cat(rows, dim=dim) if rows else part.narrow(dim, 0, 0).clone()

    new = _rebuilt(x, change, shape)
    new.__dict__[_BLOCK] = _blocks(x, dim)
    return new


def keep_block(placed: Any, param: Any) -> None:
    """Note on a parameter what `taken` has noted on the part that it holds."""
    noted = placed._local_tensor.__dict__.get(_BLOCK)
    if noted is not None:
        param._local_tensor.__dict__[_BLOCK] = noted


def joined(
    x_local: Any, layout: ParamLayout, gather: Callable[[torch.Tensor, ParamLayout], torch.Tensor]
) -> Any:
    """The whole of a torchao tensor of which each rank holds its part.

    Args:
        x_local: This rank's part.
        layout: How the whole lies on the ranks.
        gather: Gathers one plain tensor.
    """
    dim = layout.dim
    assert dim is not None
    block = x_local.__dict__.get(_BLOCK, _blocks(x_local, dim))

    def change(part: torch.Tensor) -> torch.Tensor:
        has_rows = part.ndim == x_local.ndim and part.shape[dim] == x_local.shape[dim]
        if part.ndim != x_local.ndim or not (has_rows or block > 1):
            return part
        step = 1 if (has_rows and part.shape[dim] > 1) or block == 1 else block
        shape = list(part.shape)
        shape[dim] = -(-layout.shape[dim] // step)
        pieces = tuple(_in_blocks(own, step) for own in layout.pieces)
        return gather(part, ParamLayout(tuple(shape), dim, pieces))

    return _rebuilt(x_local, change, layout.shape, grows=block == 1)


def as_dtensor(
    local: Any, mesh: DeviceMesh, placement: Placement, like: torch.Tensor
) -> torch.Tensor:
    """A DTensor of which this rank holds a torchao tensor.

    Args:
        local: This rank's part.
        mesh: One axis.
        placement: How the whole lies on it.
        like: The whole.
    """
    return torch_private.dtensor_of(local, mesh, [placement], like)


def refuse_cut_blocks(
    module: nn.Module,
    param: str,
    layout: ParamLayout | None,
    dim: int,
    mesh: DeviceMesh,
    name: str,
) -> None:
    """Refuse to cut a quantized weight inside of a block that has one scale.

    Args:
        module: The layer.
        param: Its parameter.
        layout: Where it would be cut; None: evenly along `dim`.
        dim: The dim.
        mesh: The axis.
        name: The parameter's full name.

    Raises:
        PlanError: A rank's part would begin or end inside of a block.
    """
    weight = module._parameters.get(param)
    if weight is None or param != "weight":
        return
    dim = dim % weight.ndim
    if is_quantized(weight):
        block, kind = _blocks(weight, dim), type(weight).__name__
    elif has_block_scales(module):
        block, kind = block_of(module, dim), "float8"
    else:
        return
    cut = layout if layout is not None else even(tuple(weight.shape), dim, mesh.size())
    if block == 1 or cut.dim is None:
        return
    size = weight.shape[dim]
    odd = sorted(
        {at for own in cut.pieces for piece in own for at in piece if at % block and at != size}
    )
    if odd:
        parts = ", ".join(str(length(own)) for own in cut.pieces)
        raise PlanError(
            f"The quantized weight {name!r} over {mesh.size()} ranks:",
            f"it is {kind} with one scale for {block} elements along dim {dim}, and the ranks' "
            f"parts of its {size} have {parts}: {', '.join(map(str, odd))} lie inside of a block",
            [
                f"sizes of parts that are multiples of {block}: another tp_size",
                "the style 'replicate' for the layer and for the one that it feeds",
                "smaller blocks, or one scale for each row",
            ],
        )


def block_of(module: nn.Module, dim: int) -> int:
    """Elements of a float8 layer's weight along a dim that share a scale."""
    size: Any = getattr(module, "block_size", None)
    return 1 if size is None else int(size[dim])


def layout_of_scales(module: nn.Module, weight: ParamLayout) -> ParamLayout:
    """How a float8 layer's scales lie on the ranks.

    Args:
        module: The layer.
        weight: How its weight does.
    """
    scales = module._parameters[SCALES]
    assert scales is not None
    if weight.dim is None or scales.ndim == 0 or getattr(module, "block_size", None) is None:
        return ParamLayout(tuple(scales.shape))
    block = block_of(module, weight.dim)
    pieces = tuple(_in_blocks(own, block) for own in weight.pieces)
    return ParamLayout(tuple(scales.shape), weight.dim, pieces)
