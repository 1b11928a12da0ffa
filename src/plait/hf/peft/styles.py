"""How the factors of an adapter lie on the ranks: as the layer that they adapt.

| layer | its weight | `lora_A` `[r, in]` | `lora_B` `[out, r]` |
|---|---|---|---|
| column-parallel | output features split | whole | split as the weight's rows |
| row-parallel | input features split | split as the weight's columns | whole |
| embedding | vocabulary split | split over the vocabulary | whole |
| whole | whole | whole | whole |

A column-parallel `lora_B` and a row-parallel `lora_A` get the border of the layer's own style, so
what comes out of the adapter lies as what comes out of the layer.

Source: Hu et al., LoRA (arXiv 2106.09685), section 4.1: W x + scaling · B A x.
"""

from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plait.errors import PlanError
from plait.plan.intervals import ParamLayout
from plait.styles import TensorParallelLayer
from plait.styles.embedding import EmbeddingParallel
from plait.styles.heads import cut_of, place_layout, set_cut
from plait.styles.linear import ColwiseParallel, RowwiseParallel
from plait.styles.packed import PackedColwiseParallel, PackedRowwiseParallel
from plait.styles.params import place
from plait.styles.whole import ReplicateParallel
from plait.surgery.loading import layout_of

Side = Literal["out", "in", "rows", "hidden", "none"]
"""What of a layer is split: output features, input features, an embedding's rows or hidden dim."""


def side_of(base: nn.Module) -> Side | None:
    """What of a layer is split; None where its style is none of those known."""
    border = base.__dict__.get("_plait_border")
    style = border.style if border is not None else None
    if isinstance(style, ColwiseParallel | PackedColwiseParallel):
        return "out"
    if isinstance(style, RowwiseParallel | PackedRowwiseParallel):
        return "in"
    if isinstance(style, EmbeddingParallel):
        return "rows" if style.shard_dim == 0 else "hidden"
    if style is None or isinstance(style, ReplicateParallel):
        return "none"
    return None


class AlongFeatures(ReplicateParallel):
    """Parameters of which one dim is that of a layer's features, and cut as these.

    Args:
        base: The layer.
        dim: Their dim.
        param: The layer's parameter whose cut they follow.
    """

    def __init__(self, base: nn.Module, dim: int, param: str = "weight") -> None:
        self.base, self.dim, self.param = base, dim, param

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The features of the layer that each rank has; None: whole."""
        tensor, like = module._parameters[param], self.base._parameters[self.param]
        assert tensor is not None and like is not None
        known = layout_of(self.param, like)
        if known.dim is None or self.dim >= tensor.ndim:
            return None
        return ParamLayout(tuple(tensor.shape), self.dim, known.pieces)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut them."""
        layout, cut = self.param_layout(module, param, mesh), cut_of(module, param)
        if layout is None:
            return
        if cut is not None:
            cut.dims[param] = self.dim
        if cut is None and layout.pieces == _even(layout, mesh):
            place(module, param, mesh, Shard(self.dim))
        else:
            place_layout(module, param, mesh, layout)


def _even(layout: ParamLayout, mesh: DeviceMesh) -> Any:
    from plait.plan.intervals import even

    assert layout.dim is not None
    return even(layout.shape, layout.dim, mesh.size()).pieces


class Following(AlongFeatures):
    """A linear factor that is cut as the layer, with the border of the layer's style."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the border of the layer's style around the factor's forward."""
        style: TensorParallelLayer = self.base.__dict__["_plait_border"].style
        return style.install_forward(module, mesh)


def factor(child: nn.Module, base: nn.Module, dim: int, mesh: DeviceMesh) -> Following:
    """The style of a linear factor on the split side of a layer; it gets the layer's heads too."""
    _share_heads(child, base, mesh)
    return Following(base, dim)


def along_heads(child: nn.Module, base: nn.Module, dim: int, mesh: DeviceMesh) -> AlongFeatures:
    """The style of vectors on the split side of a layer; they get the layer's heads too."""
    _share_heads(child, base, mesh)
    return AlongFeatures(base, dim)


def _share_heads(child: nn.Module, base: nn.Module, mesh: DeviceMesh) -> None:
    cut = cut_of(base)
    if cut is not None and cut_of(child) is None:
        set_cut(child, "", cut.cut, mesh)


def refused(part: Any, name: str, reason: str) -> PlanError:
    """The error that an adapter cannot work on its layer as it is split."""
    base = part.get_base_layer() if hasattr(part, "get_base_layer") else part.original_module
    border = base.__dict__.get("_plait_border")
    split = f", split by {type(border.style).__name__}" if border is not None else ""
    kind = f"{type(part).__module__.split('.')[-2]}.{type(part).__name__}"
    return PlanError(
        f"The adapter {kind} on {name!r} ({type(base).__name__}{split}):",
        reason,
        ["leave the layer out of target_modules", "tp_plan={…: 'replicate'} for the layer"],
    )
