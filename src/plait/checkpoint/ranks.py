"""A rank's place among those that save or load together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """Where this rank stands.

    Attributes:
        index: Its place among all ranks of the mesh, in their order.
        num_ranks: How many there are.
        data_index: Its place among those that see different samples.
        num_data_ranks: How many of those there are.
        layout: The axes with their sizes, outer to inner; those of size 1 left out.
        data_of: For each rank its `data_index`.
    """

    index: int
    num_ranks: int
    data_index: int
    num_data_ranks: int
    layout: Mapping[str, int]
    data_of: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.index == 0


def place_of(mesh: "DeviceMesh | None") -> Place:
    """This rank's place on a mesh; None is one process."""
    if mesh is None:
        return Place(0, 1, 0, 1, {}, (0,))
    names = mesh.mesh_dim_names or tuple(f"dim {dim}" for dim in range(mesh.ndim))
    sizes = tuple(mesh.shape)
    layout = {name: size for name, size in zip(names, sizes, strict=True) if size > 1}
    total = mesh.size()
    data_of = tuple(_data_index(rank, names, sizes) for rank in range(total))
    index = 0
    for size, at in zip(sizes, mesh.get_coordinate() or (), strict=True):
        index = index * size + at
    return Place(index, total, data_of[index], max(data_of) + 1, layout, data_of)


def _data_index(rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    """The place of a rank on the data axes as one."""
    place = []
    for size in reversed(sizes):
        place.append(rank % size)
        rank //= size
    index = 0
    for name, size, at in zip(names, sizes, reversed(place), strict=True):
        if name.startswith("dp"):
            index = index * size + at
    return index
