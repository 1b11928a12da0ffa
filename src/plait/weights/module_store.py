"""The tensors of a module as a store that recipes read from: gathered one at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plait.plan.intervals import ParamLayout, joined
from plait.weights.regions import Region, copy_region
from plait.weights.sharded import is_first, without_fsdp
from plait.weights.slots import layout_of_slot, slots_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModuleStore:
    """The persistent tensors of a module, each under one name, whole on the writing rank.

    Args:
        module: The module; its parameters may be DTensors.
        layouts: How the tensors lie on the ranks, where not as their DTensors are placed.
        mesh: The axis over which they are split; None for one process.
        names: Which tensors, where not all; a tied one is taken under the first of its names.
        world: The mesh of all ranks that take part, where there are more than those of `mesh`.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, ParamLayout] | None = None,
        mesh: "DeviceMesh | None" = None,
        names: Iterable[str] | None = None,
        world: "DeviceMesh | None" = None,
    ) -> None:
        self.mesh = mesh if world is None else world
        self._tp_mesh = mesh
        slots = slots_of(module)
        wanted = list(slots) if names is None else list(names)
        seen: set[int] = set()
        self._slots = {}
        for name in wanted:
            slot = slots[name]
            if id(slot.tensor) not in seen and (names is not None or slot.persistent):
                seen.add(id(slot.tensor))
                self._slots[name] = slot
        self._layouts = {
            name: layout_of_slot(name, slot, layouts or {}) for name, slot in self._slots.items()
        }
        self._whole: dict[str, Tensor] = {}

    @property
    def writes(self) -> bool:
        """Whether this is the rank that receives the whole tensors."""
        return is_first(self.mesh)

    def keys(self) -> Sequence[str]:
        """Returns the names of all tensors."""
        return list(self._slots)

    def info(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape of the whole tensor and its dtype."""
        return self._layouts[key].shape, self._slots[key].tensor.dtype

    def gather(self, key: str) -> None:
        """Makes a tensor whole on the writing rank, on its CPU; all ranks must call it.

        Comm:
            One all-gather of the tensor over each axis that splits it.
        """
        if key in self._whole:
            return
        layout, tp_mesh = self._layouts[key], self._tp_mesh
        x = without_fsdp(self._slots[key].tensor.detach(), layout)
        split = layout.dim is not None and tp_mesh is not None and tp_mesh.size() > 1
        if split and self._is_beside_writer():  # other copies have no use for the whole
            from plait import comm

            assert tp_mesh is not None and layout.dim is not None
            x = comm.all_gather(x.contiguous(), tp_mesh, layout.dim, sizes=layout.sizes)
            x = in_order(x, layout) if self.writes else x
        self._whole[key] = x.cpu() if self.writes else x.new_empty(0)

    def _is_beside_writer(self) -> bool:
        """Whether this rank is in the tensor-parallel group of the rank that writes."""
        if self.mesh is None or self.mesh.ndim == 1:
            return True
        place = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True)
        return not any(index for name, index in place if name != "tp")

    def whole(self, key: str) -> Tensor:
        """Returns a gathered tensor."""
        return self._whole[key]

    def drop(self, key: str) -> None:
        """Forgets a gathered tensor."""
        del self._whole[key]

    def read_into(self, key: str, region: Region, out: Tensor) -> None:
        """Copies a region of a gathered tensor into `out`."""
        copy_region(self._whole[key], region, out)


def in_order(x: Tensor, layout: ParamLayout) -> Tensor:
    """Puts the pieces of all ranks, one rank after another in `x`, in the order of the whole.

    Args:
        x: The concatenation of all ranks' local tensors along the layout's dimension.
        layout: Which pieces each rank holds.

    Returns:
        The whole tensor; `x` itself where the ranks hold one stretch after another.
    """
    dim = layout.dim
    pieces = [piece for rank in layout.pieces for piece in rank]
    if dim is None or joined(pieces) == ((0, layout.shape[dim]),):
        return x
    out = x.new_empty(layout.shape)
    position = 0
    for a, b in pieces:
        out.narrow(dim, a, b - a).copy_(x.narrow(dim, position, b - a))
        position += b - a
    return out
