"""What a rank holds of each tensor of a checkpoint: of the model here, of the optimizer beside."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.checkpoint.boxes import Box, Whole
from plait.checkpoint.manifest import MODEL
from plait.state import Piece, pieces_of, state_of, tp_layout

EXTRA = "_extra_state"


@dataclass(frozen=True)
class Held:
    """One tensor, and which of it this rank holds.

    Attributes:
        name: The parameter or buffer, or the parameter that a state of the optimizer is for.
        shape: Of the whole.
        local: This rank's tensor; writing to it changes the model.
        pieces: The parts of the whole in it.
    """

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def whole(self) -> Whole:
        """What all ranks know of it."""
        return Whole(self.name, self.shape, self.local.element_size())

    @property
    def boxes(self) -> list[Box]:
        """The parts of the whole."""
        return [(piece.offsets, piece.sizes) for piece in self.pieces]

    def part(self, box: Box) -> torch.Tensor:
        """A view of the part of the local tensor that lies in one of the pieces."""
        for piece in self.pieces:
            inner = [start - at for start, at in zip(box[0], piece.offsets, strict=True)]
            sizes = zip(inner, box[1], piece.sizes, strict=True)
            if all(at >= 0 and at + size <= limit for at, size, limit in sizes):
                x = piece.of(self.local)
                for dim, (at, size) in enumerate(zip(inner, box[1], strict=True)):
                    x = x.narrow(dim, at, size)
                return x
        raise KeyError(box)


@dataclass(frozen=True)
class HeldModel:
    """The parameters and persistent buffers of a module.

    Attributes:
        tensors: By name; a tied one under the first of its names.
        params: The tensors themselves by those names, DTensors where they are.
        tied: Other names → the first.
        extra: What modules keep beside tensors (`get_extra_state`), by name.
    """

    tensors: Mapping[str, Held]
    params: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    extra: Mapping[str, Any]

    def keyed(self) -> dict[str, Held]:
        """The tensors by their keys in the checkpoint."""
        return {MODEL + name: held for name, held in self.tensors.items()}


def plain(model: nn.Module) -> nn.Module:
    """The module inside what `torch.compile` returns."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """All ranks over which a module's tensors lie, or None where it is whole in this process."""
    state = state_of(model)
    if state is not None:
        return state.mesh
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def held_model(model: nn.Module) -> HeldModel:
    """What this rank holds of a module's parameters and persistent buffers."""
    state = state_of(model)
    layouts = {} if state is None else state.layouts
    tensors: dict[str, Held] = {}
    params: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first: dict[int, str] = {}
    # FSDP puts the sharded parameters back in place before it answers.
    for name, x in model.state_dict(keep_vars=True).items():
        if not isinstance(x, torch.Tensor) or name.endswith(EXTRA):
            extra[name] = x
        elif id(x) in first:
            tied[name] = first[id(x)]
        else:
            first[id(x)] = name
            params[name] = x
            shape = tuple(tp_layout(x, layouts.get(name)).shape)
            pieces = tuple(pieces_of(x, layouts.get(name)))
            tensors[name] = Held(name, shape, local_of(x), pieces)
    return HeldModel(tensors, params, tied, extra)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's tensor, sharing memory with `x`."""
    with torch.no_grad():
        return x.to_local().detach() if isinstance(x, DTensor) else x.detach()
