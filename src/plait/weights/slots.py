"""The places of a module that tensors go into: parameters and buffers, shared ones once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from plait.errors import PlanError
from plait.plan.intervals import ParamLayout, even, packed, whole
from plait.run import torch_private
from plait.run.torch_private import StridedShard
from plait.styles.quantized import is_quantized


@dataclass(frozen=True)
class Slot:
    """One tensor of a module, and every place where the module keeps it.

    Args:
        tensor: What is there now.
        places: The owning modules with the attribute's name; several where the tensor is tied.
        persistent: Whether it belongs to the module's state dict.
    """

    tensor: Tensor
    places: tuple[tuple[nn.Module, str], ...]
    persistent: bool

    @property
    def local(self) -> Tensor:
        """The tensor that this rank holds."""
        with torch.no_grad():
            return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor

    @property
    def on_meta(self) -> bool:
        """Whether it has no storage yet."""
        return self.local.device.type == "meta"

    def fill(self, local: Tensor) -> None:
        """Puts a rank's own tensor in place; a parameter stays one, a DTensor keeps its spec.

        Args:
            local: The local tensor, on its device.
        """
        old = self.tensor
        new = placed_like(old, local) if isinstance(old, DTensor) else local
        if isinstance(old, nn.Parameter):
            grad = old.requires_grad and (local.is_floating_point() or local.is_complex())
            new = nn.Parameter(new, requires_grad=grad)
        new.__dict__.update(old.__dict__)
        for module, name in self.places:
            if isinstance(new, nn.Parameter):
                module._parameters[name] = new
            else:
                module._buffers[name] = new


def placed_like(old: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor as `old` is, with another local tensor; nothing is communicated."""
    if is_quantized(local):
        return torch_private.dtensor_of(local, old.device_mesh, old.placements, old)
    return DTensor.from_local(
        local,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )


def slots_of(module: nn.Module) -> dict[str, Slot]:
    """Returns every parameter and buffer of a module by each of its names; tied names share."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    named: dict[str, tuple[Tensor, bool]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        tables = (owner._parameters, owner._buffers)
        for attribute, tensor in ((k, x) for table in tables for k, x in table.items()):
            if tensor is None:
                continue
            persistent = attribute not in owner._non_persistent_buffers_set
            named[dot + attribute] = (tensor, persistent)
            known = places.setdefault(id(tensor), [])
            if not any(m is owner and n == attribute for m, n in known):
                known.append((owner, attribute))
    return {
        name: Slot(tensor, tuple(places[id(tensor)]), persistent)
        for name, (tensor, persistent) in named.items()
    }


def layout_of_slot(name: str, slot: Slot, layouts: Mapping[str, ParamLayout]) -> ParamLayout:
    """Returns how a slot lies on the ranks: as `layouts` says, else as its DTensor is placed."""
    return layouts[name] if name in layouts else layout_of_tensor(name, slot.tensor)


def layout_of_tensor(name: str, x: Tensor) -> ParamLayout:
    """Returns the index ranges that a tensor's placement on a one-axis mesh stands for.

    Args:
        name: For messages.
        x: A DTensor, or a plain tensor (whole on every rank).

    Raises:
        PlanError: The placement is none of `Replicate`, `Shard`, `_StridedShard`, or there are
            several, or a strided shard does not divide the tensor into equal parts.
    """
    shape = tuple(x.shape)
    if not isinstance(x, DTensor) or all(p.is_replicate() for p in x.placements):
        return whole(shape)
    match x.placements:
        case (StridedShard(dim=dim, split_factor=parts),):
            sections = (shape[dim] // parts,) * parts
            return packed(shape, dim, x.device_mesh.size(), sections)
        case (Shard(dim=dim),):
            return even(shape, dim, x.device_mesh.size())
    raise PlanError(
        f"The placements {tuple(x.placements)} of {name!r}:",
        "plait cannot tell which index ranges each rank holds",
        ("use Shard(dim) or Replicate() on one axis", "give its layout"),
    )
