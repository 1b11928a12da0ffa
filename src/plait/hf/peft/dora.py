"""DoRA on split layers: norms of the adapted weight's rows, whose parts lie on the ranks.

The output is m / ‖W + s B A‖ · (W + s B A) x, with one magnitude m and one norm for each output
feature. Where the output features are split, each rank has the magnitudes and the norms of its own;
where the input features are, the squares of all ranks are added.

Source: Liu et al., DoRA (arXiv 2402.09353), equation 5 and section 4.3 (the norm is a constant in
the backward).
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import all_reduce, gather_from, local
from plait.loss.asking import asked_of, split_output
from plait.loss.logits import SplitLogits
from plait.styles.activations import uneven_sizes
from plait.styles.heads import cut_of, rearranged
from plait.styles.layer import border_of
from plait.styles.linear_kinds import features, slices
from plait.surgery.data_ranks import without_chunks
from plait.surgery.loading import layout_of

_SIDE, _MESH = "_plait_dora_side", "_plait_dora_mesh"


def finish(part: Any, side: str, mesh: DeviceMesh) -> None:
    """Make the magnitudes of an adapted layer work on its parts.

    Args:
        part: The wrapping layer.
        side: What of the layer is split.
        mesh: The axis.
    """
    for vector in getattr(part, "lora_magnitude_vector", {}).values():
        vector.__dict__[_SIDE], vector.__dict__[_MESH] = side, mesh
        vector.__dict__["get_weight_norm"] = MethodType(_get_weight_norm, vector)
        if side in ("out", "in", "none") and not hasattr(part, "_embed"):
            border_of(vector).forward = MethodType(_linear_forward, vector)
        else:
            border_of(vector).forward = MethodType(_embedding_forward, vector)


def _get_weight_norm(
    self: Any,
    weight: torch.Tensor,
    lora_weight: torch.Tensor,
    scaling: float,
    adapter_name: Any = None,
) -> torch.Tensor:
    """The norms of the rows of an adapted weight, from this rank's part of it."""
    adapted = (weight.T if self.fan_in_fan_out else weight) + scaling * lora_weight
    if self.__dict__[_SIDE] not in ("in", "rows") or self.__dict__[_MESH].size() == 1:
        return torch.linalg.norm(adapted, dim=1).to(weight.dtype)
    squares = adapted.float() if weight.dtype.itemsize < 4 else adapted
    total = all_reduce(squares.square().sum(dim=1), self.__dict__[_MESH])
    return total.sqrt().to(weight.dtype)


def _own(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """What this rank holds of a parameter, without a gradient."""
    param = module._parameters[name]
    assert param is not None
    with torch.no_grad():
        return without_chunks(param, layout_of(name, param)).detach()


def _linear_forward(
    self: Any,
    x: torch.Tensor,
    *,
    lora_A: nn.Module,
    lora_B: nn.Module,
    scaling: float,
    base_layer: nn.Module,
    base_result: torch.Tensor | None = None,
    adapter_name: str = "default",
) -> Any:
    """What comes to the output of the layer; see `DoraLinearLayer.forward` of PEFT."""
    side, mesh = self.__dict__[_SIDE], self.__dict__[_MESH]
    with torch.no_grad():
        adapted = (_own(lora_B) @ _own(lora_A)).to(x.dtype)
        norm = self.get_weight_norm(_own(base_layer).to(x.dtype), adapted, scaling)
    scale = self.weight / norm
    result = lora_B(lora_A(x))
    base_result = base_layer(x) if base_result is None else base_result
    if side == "out":
        scale, bias = _seen(scale, base_layer, mesh), _seen_bias(base_layer, mesh)
    else:
        bias = base_layer._parameters.get("bias")
        bias = None if bias is None else local(bias)
    plain = base_result if bias is None else base_result - bias
    return (scale - 1) * plain + scale * result * scaling


def _seen_bias(base: nn.Module, mesh: DeviceMesh) -> Any:
    bias = base._parameters.get("bias")
    return None if bias is None else _seen(local(bias), base, mesh)


def _seen(x_owned: torch.Tensor, base: nn.Module, mesh: DeviceMesh) -> Any:
    """A vector of a column-parallel layer's output features, as its output has them: `[1, out]`.

    Args:
        x_owned: The features that this rank stores.
        base: The layer.
        mesh: The axis.
    """
    cut = cut_of(base)
    if cut is not None:
        x_owned = cut.needed(x_owned, 0)
        if cut.places is not None:
            x_owned = rearranged(x_owned, 0, cut.places)
    row = x_owned.view(1, -1)
    style: Any = border_of(base).style
    layouts = getattr(style, "output_layouts", None)
    if layouts is None or not layouts.is_replicate():
        return row
    asked = asked_of(base)
    if asked is not None:
        split: SplitLogits = split_output(row, slices(base, row, mesh), mesh, asked)
        return split
    width = features(base)[0]
    assert width is not None
    return gather_from(row, mesh, dim=-1, sizes=uneven_sizes(width, mesh.size()))


def _embedding_forward(
    self: Any,
    x: torch.Tensor,
    *,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scaling: float,
    base_layer: nn.Module,
    embed_fn: Any,
    adapter_name: str = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of the layer's output and what comes to it; factors are this rank's parts."""
    with torch.no_grad():
        adapted = (lora_A @ lora_B).T
        norm = self.get_weight_norm(_own(base_layer), adapted, scaling)
    scale = self.weight / norm
    return scale, scale * (embed_fn(x, lora_A) @ lora_B) * scaling
