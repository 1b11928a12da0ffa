"""Parameters and activations cut on the borders of heads, as one rank uses them.

A rank stores the features of its own heads. Of a key/value head that several ranks need each of
them stores a part, and the parts are gathered when the head is used: forward one all-gather of
these rows, backward one reduce-scatter of their gradient, so the gradient of every element is
summed once and lies where the element lies. In one call of `generate()` the gathered rows are kept.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait.comm import gather_copy
from plait.errors import PlanError
from plait.plan.cuts import Cut
from plait.plan.intervals import ParamLayout, Pieces, aligned, even, joined, length, taken
from plait.styles import quantized
from plait.styles.kept import keep, kept
from plait.styles.params import CUTS, place, set_param


def rearranged(x: torch.Tensor, dim: int, pieces: Pieces) -> torch.Tensor:
    """The ranges `pieces` of `x` along `dim`, one after another; some may repeat.

    Args:
        x: Any tensor.
        dim: The dim.
        pieces: Half-open ranges along it.
    """
    borders = sorted({0, x.shape[dim]} | {at for piece in pieces for at in piece})
    sizes = [b - a for a, b in pairwise(borders)]
    parts = dict(zip(borders, x.split(sizes, dim=dim), strict=False))
    found = [part for a, b in pieces for at, part in parts.items() if a <= at < b]
    return found[0] if len(found) == 1 else torch.cat(found, dim=dim)


class RankCut:
    """A [`Cut`][plait.plan.cuts.Cut] as one rank uses it; it lives on the module.

    Attributes:
        cut: The cut.
        mesh: The axis.
        places: What the rank's attention sees, as ranges of the rank's features, or None.
        real: The inverse, or None.
        dims: Parameter name → the dim of it that is cut.
    """

    __slots__ = ("_own", "_sizes", "_wanted", "cut", "dims", "mesh", "places", "real")

    def __init__(self, cut: Cut, mesh: DeviceMesh) -> None:
        rank = mesh.get_local_rank()
        self.cut, self.mesh = cut, mesh
        self.places, self.real = cut.places[rank], cut.real[rank]
        self.dims: dict[str, int] = {}
        self._own: Pieces = ()
        self._wanted: list[tuple[bool, int, int]] = []
        self._sizes: tuple[int, ...] = ()
        if cut.is_shared:
            self._prepare(rank)

    def _prepare(self, rank: int) -> None:
        """Where each range that the rank needs is: in its own rows or in the gathered ones."""
        cut = self.cut
        ends = [
            at for ranks in (cut.need, cut.owned) for pieces in ranks for p in pieces for at in p
        ]
        borders = sorted({0, cut.size, *ends})
        where: dict[int, tuple[int, int, int | None]] = {}
        sizes, gathered = [], 0
        for owner, pieces in enumerate(cut.owned):
            position, before = 0, gathered
            own = []
            for start, stop in _elementary(pieces, borders):
                users = sum(_holds(needed, start) for needed in cut.need)
                where[start] = (owner, position, gathered if users > 1 else None)
                if users > 1:
                    own.append((position, position + stop - start))
                    gathered += stop - start
                position += stop - start
            sizes.append(gathered - before)
            if owner == rank:
                self._own = tuple(own)
        self._sizes = tuple(sizes)
        for start, stop in _elementary(cut.need[rank], borders):
            owner, position, shared = where[start]
            mine = owner == rank
            at = position if mine else shared
            assert at is not None
            self._wanted.append((mine, at, at + stop - start))

    def needed(self, x_owned: torch.Tensor, dim: int, key: str = "") -> torch.Tensor:
        """The features that this rank works on, from those that it stores.

        Args:
            x_owned: The rank's own tensor.
            dim: The dim that is cut.
            key: Name under which the result is kept in one call of `generate()`.

        Comm:
            Nothing where no head is shared. Otherwise forward one all-gather of the shared rows,
            backward one reduce-scatter of their gradient. In `generate()` once a call.
        """
        if not self.cut.is_shared:
            return x_owned
        if quantized.is_quantized(x_owned):
            return self._needed_quantized(x_owned, dim, key)
        keeps = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        if keeps and (known := kept(self, key, x_owned)) is not None:
            return known
        if self._own:
            shared = rearranged(x_owned, dim, self._own)
        else:
            shared = x_owned.narrow(dim, 0, 0)
        gathered = gather_copy(shared.contiguous(), self.mesh, dim, self._sizes)
        parts = [
            (x_owned if mine else gathered).narrow(dim, a, b - a) for mine, a, b in self._wanted
        ]
        # Nothing of the gathered rows, so that every rank takes part in the backward.
        parts.append(gathered.narrow(dim, 0, 0))
        found = torch.cat(parts, dim=dim)
        if keeps:
            keep(self, key, x_owned, found)
        return found

    def _needed_quantized(self, x_owned: Any, dim: int, key: str) -> torch.Tensor:
        """As `needed`, of the numbers, scales and zero points of a quantized weight."""
        shape = list(x_owned.shape)
        shape[dim] = length(self.cut.need[self.mesh.get_local_rank()])
        names = iter(range(9))

        def change(part: torch.Tensor) -> torch.Tensor:
            return self.needed(part.contiguous(), dim, f"{key}.{next(names)}")

        return quantized.changed(x_owned, dim, change, shape)

    @property
    def seen_size(self) -> int:
        """Features that the rank's attention sees."""
        need = self.cut.need[self.mesh.get_local_rank()]
        return length(need if self.places is None else self.places)

    @property
    def counted(self) -> Pieces | None:
        """Ranges of the features seen that a sum over all ranks takes from this one; None: all."""
        if self.places is None and not self.cut.is_shared:
            return None
        rank = self.mesh.get_local_rank()
        need, owned = self.cut.need[rank], self.cut.owned[rank]
        seen = taken(need, self.places) if self.places is not None else need
        found, position, met = [], 0, set()
        for start, stop in _elementary(seen, sorted({at for p in (*seen, *owned) for at in p})):
            if start not in met and _holds(owned, start):
                met.add(start)
                found.append((position, position + stop - start))
            position += stop - start
        return joined(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankCut":
        copied = RankCut(self.cut, self.mesh)
        copied.dims = dict(self.dims)
        return copied


def own_features(x: DTensor, cut: RankCut | None) -> torch.Tensor:
    """The features of an input that a rank's rows of a weight meet.

    Args:
        x: The input, in any placement.
        cut: Where the features are cut, or None: evenly.

    Raises:
        PlanError: `x` is split in another way than the weight.
    """
    last = Shard(x.ndim - 1)
    if cut is None or (cut.cut.is_even and cut.real is None):
        return x.redistribute(placements=[last]).to_local()
    own = cut.cut.owned[cut.mesh.get_local_rank()]
    if x.placements[0] != last:
        whole: DTensor = x.redistribute(placements=[Replicate()])
        return rearranged(whole.to_local(grad_placements=[Partial()]), -1, own)
    found = x.to_local()
    if cut.real is not None and found.shape[-1] == cut.seen_size:
        return rearranged(found, -1, cut.real)
    if found.shape[-1] != length(own):
        raise PlanError(
            "A rowwise layer whose input is a DTensor:",
            f"this rank has {found.shape[-1]} features of it, and rows of {length(own)}: the "
            "weight is cut on the borders of heads",
            ["hand it on whole: placements=[Replicate()]", "hand on the local tensor"],
        )
    return found


def _elementary(pieces: Pieces, borders: list[int]) -> list[tuple[int, int]]:
    found = []
    for a, b in pieces:
        inside = [at for at in borders if a <= at <= b]
        found += list(pairwise(inside))
    return found


def _holds(pieces: Pieces, at: int) -> bool:
    return any(a <= at < b for a, b in pieces)


def set_cut(module: nn.Module, name: str, cut: Cut, mesh: DeviceMesh) -> None:
    """Tell a module that a dim of its parameter `name` (`""`: of all of them) is made of heads."""
    module.__dict__.setdefault(CUTS, {})[name] = RankCut(cut, mesh)


def cut_of(module: nn.Module, name: str = "") -> RankCut | None:
    """What `set_cut` left for a parameter of `module`."""
    cuts: dict[str, RankCut] | None = module.__dict__.get(CUTS)
    return None if cuts is None else cuts.get(name, cuts.get(""))


def cut_layout(
    module: nn.Module, name: str, dim: int, mesh: DeviceMesh | None = None
) -> ParamLayout | None:
    """The ranges that each rank stores of a parameter, where they are no ordinary shard.

    With a mesh also those of stacked experts.
    """
    tensor, found = module._parameters.get(name), cut_of(module, name)
    if tensor is not None and found is None and mesh is not None:
        shape, size = tuple(tensor.shape), tensor.element_size()
        return aligned(shape, dim, mesh.size(), (shape[dim],), size)
    if tensor is None or found is None or found.cut.is_even:
        return None
    return found.cut.layout(tuple(tensor.shape), dim)


def place_layout(module: nn.Module, name: str, mesh: DeviceMesh, layout: ParamLayout) -> None:
    """Replace one parameter by a DTensor of which this rank holds its pieces of `layout`.

    torch has no placement for pieces of unequal size: the DTensor is a `Shard` in rank order, and
    the layout that is recorded with it says where each piece belongs.
    """
    tensor = module._parameters.get(name)
    if tensor is None:
        return
    assert layout.dim is not None
    with torch.no_grad():
        pieces = layout.pieces[mesh.get_local_rank()]
        source = tensor.detach()
        if quantized.is_quantized(source):
            part = quantized.taken(source, layout.dim, pieces)
            placed = quantized.as_dtensor(part, mesh, Shard(layout.dim), source)
            set_param(module, name, placed, like=tensor)
            return
        rows = [source.narrow(layout.dim, a, b - a) for a, b in pieces]
        local = torch.cat(rows, dim=layout.dim) if rows else source.narrow(layout.dim, 0, 0)
        assert local.shape[layout.dim] == length(pieces)
        placed = DTensor.from_local(
            local,
            mesh,
            [Shard(layout.dim)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    set_param(module, name, placed, like=tensor)


def place_features(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Cut one parameter along `dim`: on the borders of its heads, or evenly where it has none."""
    layout, found = cut_layout(module, name, dim, mesh), cut_of(module, name)
    if found is not None:
        found.dims[name] = dim
    if layout is None:
        place(module, name, mesh, Shard(dim))
    else:
        place_layout(module, name, mesh, layout)


def scales_layout(module: nn.Module, dim: int, mesh: DeviceMesh) -> ParamLayout:
    """How the block scales of a float8 layer lie on the ranks, whose weight is cut along `dim`."""
    weight = module._parameters["weight"]
    assert weight is not None
    cut = cut_layout(module, "weight", dim, mesh) or even(tuple(weight.shape), dim, mesh.size())
    return quantized.layout_of_scales(module, cut)


def place_scales(
    module: nn.Module, name: str, mesh: DeviceMesh, layout: ParamLayout | None
) -> None:
    """Cut the scales of a float8 layer as `layout` says; what has no dim stays whole."""
    if layout is None or layout.dim is None:
        place(module, name, mesh, Replicate())
    else:
        place_layout(module, name, mesh, layout)
