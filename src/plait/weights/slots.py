"""The places of a module that tensors go into: parameters and buffers, shared ones once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from plait.errors import WeightsError
from plait.plan.intervals import ParamLayout, even, whole


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
        new = local
        if isinstance(old, DTensor):
            shape, stride = old.shape, old.stride()
            new = DTensor.from_local(
                local, old.device_mesh, old.placements, run_check=False, shape=shape, stride=stride
            )
        if isinstance(old, nn.Parameter):
            grad = old.requires_grad and (local.is_floating_point() or local.is_complex())
            new = nn.Parameter(new, requires_grad=grad)
        new.__dict__.update(old.__dict__)
        for module, name in self.places:
            if isinstance(new, nn.Parameter):
                module._parameters[name] = new
            else:
                module._buffers[name] = new


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
    if name in layouts:
        return layouts[name]
    x = slot.tensor
    if not isinstance(x, DTensor):
        return whole(tuple(x.shape))
    cuts = [p for p in x.placements if isinstance(p, Shard)]
    if len(x.placements) != 1 or len(cuts) != sum(not p.is_replicate() for p in x.placements):
        raise WeightsError(
            f"Find which slice of {name} this rank owns.",
            f"its placements are {tuple(x.placements)}; only Shard or Replicate on one axis say",
            "Give its layout.",
        )
    if not cuts:
        return whole(tuple(x.shape))
    return even(tuple(x.shape), cuts[0].dim, x.device_mesh.size())
