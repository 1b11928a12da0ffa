"""PEFT's wrapping layers around split ones: how their parameters are cut, and their forwards."""

import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import sum_from
from plait.hf.peft import dora, experts
from plait.hf.peft.on_parts import ROOT, is_inside, on_parts
from plait.hf.peft.styles import AlongFeatures, Side, along_heads, factor, refused, side_of
from plait.plan.intervals import even
from plait.state import ParallelState
from plait.styles import TensorParallelLayer
from plait.styles.heads import cut_of, rearranged
from plait.styles.layer import rebind
from plait.styles.params import LocalParams
from plait.styles.randomness import split_randomness, whole_randomness
from plait.styles.sequence_params import follow_row, follow_tokens
from plait.weights.slots import placed_like

_MESH = "_plait_adapter_mesh"
_ONLY_EXPERTS = "target_parameters reach weights of experts and of whole layers, and this is split"


class Adapters:
    """What plait knows of the layers that PEFT puts around others."""

    def inner(self, part: nn.Module) -> str | None:
        """`base_layer`, for a layer of PEFT."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        return "base_layer" if isinstance(part, BaseTunerLayer) else None

    def styles(
        self, part: Any, name: str, state: ParallelState
    ) -> Mapping[str, TensorParallelLayer]:
        """The styles of factors and vectors on a split side of the layer.

        Raises:
            PlanError: This kind of adapter does not work on the layer as it is split.
        """
        from peft.tuners import ia3, lora

        if state.tp_size == 1:
            return {}
        side = side_of(part.get_base_layer())
        if isinstance(part, lora.ParamWrapper):
            if side in ("out", "in"):
                raise refused(part, name, f"{_ONLY_EXPERTS}: name it in target_modules")
            if not experts.can_adapt(part):
                raise refused(part, name, f"{part.parameter_name} is split by experts")
            return experts.styles(part)
        if side == "none":
            return {}
        if side in (None, "hidden"):
            raise refused(part, name, "adapters know nothing of this split")
        if isinstance(part, lora.Linear):
            return _linear(part, side, state.tp_mesh)
        if isinstance(part, lora.Embedding):
            return _embedding(part)
        if isinstance(part, ia3.Linear):
            return _vectors(part, name, side, state.tp_mesh)
        raise refused(part, name, "this kind of adapter works on whole layers only")

    def finish(self, part: Any, root: nn.Module, state: ParallelState) -> None:
        """Make PEFT's code work on the parts."""
        from peft.tuners import ia3, lora

        part.__dict__[_MESH], part.__dict__[ROOT] = state.tp_mesh, weakref.ref(root)
        base = part.get_base_layer()
        side = side_of(base) or "none"
        for method in (_merge, _unmerge, _get_delta_weight):
            name = method.__name__[1:]
            if hasattr(part, name):
                part.__dict__[name] = MethodType(method, part)
        if isinstance(part, lora.ParamWrapper):
            experts.bind(part, state.tp_mesh)
            return
        if isinstance(part, lora.Linear):
            for dropout in part.lora_dropout.values():
                _bind_dropout(dropout, side, state.tp_mesh)
            for adapter in part.lora_A:
                follow_row(base, part.lora_A[adapter], part.lora_B[adapter])
        if isinstance(part, lora.Embedding):
            part.__dict__["_embed"] = MethodType(_embed, part)
        if isinstance(part, lora.Embedding | ia3.Linear):
            rebind(part, _forward_on_local)
        if isinstance(part, lora.LoraLayer):
            dora.finish(part, side, state.tp_mesh)
            vectors = getattr(part, "lora_magnitude_vector", {})
            for vector in vectors.values() if side == "in" else ():
                follow_tokens(base, vector)


def check_kinds(parts: Mapping[str, Any]) -> None:
    """Refuse adapters that work on whole layers only, before the layers are split.

    Args:
        parts: The wrapping layers, by name.

    Raises:
        PlanError: One of them is of such a kind.
    """
    from peft.tuners import ia3, lora
    from peft.utils.other import ModulesToSaveWrapper

    known = (lora.Linear, lora.Embedding, lora.ParamWrapper, ia3.Linear, ModulesToSaveWrapper)
    for name, part in parts.items():
        if not isinstance(part, known):
            raise refused(part, name, "this kind of adapter works on whole layers only")


def _linear(part: Any, side: Side, mesh: DeviceMesh) -> dict[str, TensorParallelLayer]:
    base = part.get_base_layer()
    names = ("lora_B", 0) if side == "out" else ("lora_A", 1)
    found: dict[str, TensorParallelLayer] = {
        f"{names[0]}.{adapter}": factor(child, base, names[1], mesh)
        for adapter, child in getattr(part, names[0]).items()
    }
    if side == "out":
        for adapter in part.lora_magnitude_vector:
            found[f"lora_magnitude_vector.{adapter}"] = AlongFeatures(base, 0)
    return found


def _embedding(part: Any) -> dict[str, TensorParallelLayer]:
    return {"lora_embedding_A": AlongFeatures(part.get_base_layer(), 1)}


def _vectors(part: Any, name: str, side: Side, mesh: DeviceMesh) -> dict[str, TensorParallelLayer]:
    """(IA)³ scales output features, as `[out, 1]`, or of a feed-forward layer the input's."""
    base = part.get_base_layer()
    if side != ("in" if part.is_feedforward else "out"):
        return {}
    layouts = getattr(base.__dict__["_plait_border"].style, "output_layouts", None)
    if side == "out" and layouts is not None and layouts.is_replicate():
        raise refused(part, name, "its output is gathered, and (IA)³ scales what a rank computes")
    dim = 1 if part.is_feedforward else 0
    return {"ia3_l": along_heads(part.ia3_l, base, dim, mesh)}


def _merge(self: Any, *args: Any, **kwargs: Any) -> None:
    with on_parts(self):
        type(self).merge(self, *args, **kwargs)


def _unmerge(self: Any) -> None:
    with on_parts(self):
        type(self).unmerge(self)


def _get_delta_weight(self: Any, adapter: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    if is_inside(self):
        delta: torch.Tensor = type(self).get_delta_weight(self, adapter, *args, **kwargs)
        return delta
    with on_parts(self), torch.no_grad():
        delta = type(self).get_delta_weight(self, adapter, *args, **kwargs)
    name = getattr(self, "parameter_name", "weight")
    like: Any = self.get_base_layer()._parameters[name]
    return placed_like(like, delta)


def _bind_dropout(dropout: nn.Module, side: Side, mesh: DeviceMesh) -> None:
    """What an adapter drops of a whole input is the same on all ranks, of a split one its own."""
    if isinstance(dropout, nn.Dropout) and side in ("out", "in"):
        dropout.__dict__[_MESH] = mesh
        rebind(dropout, _drop_whole if side == "out" else _drop_split)


def _mesh_of(dropout: nn.Module) -> DeviceMesh:
    mesh: DeviceMesh = dropout.__dict__[_MESH]
    return mesh


def _drop_whole(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    with whole_randomness(_mesh_of(module)):
        return nn.Dropout.forward(module, input)  # type: ignore[arg-type]


def _drop_split(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    with split_randomness(_mesh_of(module)):
        return nn.Dropout.forward(module, input)  # type: ignore[arg-type]


class _AsSeen(LocalParams):
    """Local parameters; those of heads that a rank's attention computes twice are there twice."""

    __slots__ = ()

    def local(self, name: str, param: torch.Tensor) -> torch.Tensor:
        x = super().local(name, param)
        cut = cut_of(self.module, name)
        if cut is None or cut.places is None or name not in cut.dims:
            return x
        return rearranged(x, cut.dims[name], cut.places)


def _forward_on_local(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A wrapping layer's own forward; the parameters it keeps in dicts are local tensors."""
    held = [part for part in module._modules.values() if isinstance(part, nn.ParameterDict)]
    contexts = [_AsSeen(part) for part in held]
    for context in contexts:
        context.__enter__()
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def _embed(
    self: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_fn: Any = None,
    output_fn: Any = None,
) -> torch.Tensor:
    """Look up the rows of a factor of which this rank holds its part, `[vocabulary_local, r]`."""
    base, mesh = self.get_base_layer(), self.__dict__[_MESH]
    if side_of(base) != "rows" or mesh.size() == 1:
        found: torch.Tensor = type(self)._embed(self, input, weight)
        return found
    pieces = even((base.num_embeddings,), 0, mesh.size()).pieces[mesh.get_local_rank()]
    start, stop = pieces[0] if pieces else (0, 0)
    elsewhere = (input < start) | (input >= stop)
    if stop > start:
        own = base.padding_idx is not None and start <= base.padding_idx < stop
        ids = (input - start).masked_fill(elsewhere, 0)
        x = F.embedding(ids, weight, padding_idx=base.padding_idx - start if own else None)
    else:  # more ranks than rows
        x = weight.new_zeros(*input.shape, weight.shape[-1]) + weight.sum()
    return sum_from(x.masked_fill(elsewhere.unsqueeze(-1), 0), mesh)
