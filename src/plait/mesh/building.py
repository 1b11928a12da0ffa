"""The device mesh of a layout, its axes, and a rank's place on it."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.errors import LayoutError
from plait.layout import Layout, factors

_MADE: "weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]]" = weakref.WeakKeyDictionary()
"""The meshes of each default process group: a group has threads, so one is made once a layout."""


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of a layout: the axes of size above 1, outermost first, and always "tp".

    Ranks are numbered with tp fastest: on dp_replicate 2 × tp 2, ranks 0 and 1 share a copy. Where
    there are copies, there is a "dp_shard" inside them too, for FSDP reduces over both. Ranks that
    share a sequence share parameters as well, so "dp_shard" has dp_shard × cp × sp of them; which
    of them share a sequence, [`sequence_axes`][plait.mesh.sequence_axes] tells.

    Args:
        layout: As resolved against the number of processes.
        device_type: "cpu" or "cuda".

    Raises:
        LayoutError: There is no process group, or it has another size than the layout.

    Comm: one group per axis is formed, collectively, at the first call for a layout, unless the
        only axis is the whole world. All ranks must call.
    """
    _check_world(layout)
    folded = layout.folded
    always = ("tp", "dp_shard") if folded["dp_replicate"] > 1 else ("tp",)
    sizes = {name: size for name, size in folded.items() if size > 1 or name in always}
    return _made(device_type, sizes)


def _check_world(layout: Layout) -> None:
    """Refuse a layout that is not that of the process group."""
    asked = f"a mesh of {factors(layout.sizes)}"
    if not (dist.is_available() and dist.is_initialized()):
        raise LayoutError(
            asked,
            "there is no process group",
            (
                "start the script with torchrun",
                "call plait.run.process_group.ensure() or init_process_group() first",
            ),
        )
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(
            asked,
            f"{factors(layout.sizes)} = {layout.world_size} ranks, but the process group has "
            f"{dist.get_world_size()}",
            "resolve the config with the size of the process group",
        )


def _made(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    key = (device_type, tuple(sizes.items()))
    made = _MADE.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes.keys())
        )
    return made[key]


@dataclass(frozen=True)
class SequenceAxes:
    """The ranks that share a sequence, each with some of its tokens.

    Attributes:
        both: All of them as one axis: cp outside, sp inside.
        cp: Those among which keys and values travel (ring attention); None: this one alone.
        sp: Those that exchange tokens for heads (Ulysses), neighbours in rank; None likewise.
        samples: The ranks with the same place in other sequences: copies and shards; None: none.
        mesh: All axes of the layout, for who wants one by its name.
    """

    both: DeviceMesh
    cp: DeviceMesh | None
    sp: DeviceMesh | None
    samples: DeviceMesh | None
    mesh: DeviceMesh

    @property
    def cp_size(self) -> int:
        """Ranks on the ring."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def sp_size(self) -> int:
        """Ranks that exchange heads."""
        return 1 if self.sp is None else self.sp.size()

    @property
    def place(self) -> int:
        """This rank's place among those that share its sequence."""
        return self.both.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceAxes":
        return self


def sequence_axes(layout: Layout, device_type: str) -> SequenceAxes | None:
    """The axes over which a layout splits sequences, or None where it does not.

    Args:
        layout: As resolved against the number of processes.
        device_type: "cpu" or "cuda".

    Comm: one group for each axis and for those that are joined, formed at the first call for a
        layout. All ranks must call.
    """
    if layout.sizes["cp"] * layout.sizes["sp"] == 1:
        return None
    _check_world(layout)
    sizes = {name: size for name, size in layout.sizes.items() if size > 1}
    mesh = _made(device_type, sizes)
    cp, sp = (axis(mesh, name) if name in sizes else None for name in ("cp", "sp"))
    samples = [name for name in ("dp_replicate", "dp_shard") if name in sizes]
    return SequenceAxes(
        flat(mesh, [name for name in ("cp", "sp") if name in sizes]),
        cp,
        sp,
        flat(mesh, samples) if samples else None,
        mesh,
    )


def world(device_type: str) -> DeviceMesh:
    """All processes as one axis, on their own group.

    Args:
        device_type: "cpu" or "cuda".

    Comm: none.
    """
    made = _MADE.setdefault(dist.group.WORLD, {})
    if device_type not in made:
        made[device_type] = init_device_mesh(
            device_type, (dist.get_world_size(),), mesh_dim_names=("world",)
        )
    return made[device_type]


def axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D part of a mesh that this rank lies on along one axis.

    Args:
        mesh: A mesh with named dimensions.
        name: The axis.

    Raises:
        LayoutError: The mesh has no such axis.

    Comm: none; the axis's group was formed with the mesh.
    """
    names = mesh.mesh_dim_names or ()
    if name not in names:
        has = f"the names {', '.join(names)}" if names else "no names"
        raise LayoutError(
            f'the axis "{name}" of a device mesh of shape {tuple(mesh.shape)}',
            f"its dimensions have {has}",
            f'name the dimension: init_device_mesh(…, mesh_dim_names=("{name}",))',
        )
    return mesh if names == (name,) else mesh[name]


def flat(mesh: DeviceMesh, names: Sequence[str] | None = None) -> DeviceMesh:
    """Several axes of a mesh as one, its ranks in their order on the mesh.

    Args:
        mesh: A mesh with named dimensions.
        names: Which axes, in the mesh's order; by default all of them.

    Comm: the group of the joined axis is formed at the first call. All ranks must call.
    """
    have = mesh.mesh_dim_names or ()
    wanted = tuple(have if names is None else names)
    if len(wanted) < 2:
        return mesh if have == wanted or mesh.ndim == 1 else mesh[wanted[0]]
    part = mesh if wanted == have else mesh[wanted]
    return part._flatten("_".join(wanted))


def coordinates(mesh: DeviceMesh) -> str:
    """This rank and its place on the mesh, as in "rank 3 (dp_replicate 1, tp 1)"."""
    place = mesh.get_coordinate()
    if place is None:
        return f"rank {dist.get_rank()} (not on the mesh)"
    names = mesh.mesh_dim_names or tuple(f"dim {dim}" for dim in range(mesh.ndim))
    where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=True))
    return f"rank {dist.get_rank()} ({where})"
