"""Which index ranges of a tensor each rank of an axis holds.

A tensor is split along one dimension. The ranges that a rank holds there are its *pieces*:
half-open intervals `(start, stop)`, in the order in which the rank's local tensor holds them. One
piece a rank is an ordinary shard; several are the slices of a packed weight (gate and up, or
q, k and v, in one matrix). No piece is an empty shard.

    >>> packed((8, 4), dim=0, n=2, sections=(4, 4)).pieces
    (((0, 2), (4, 6)), ((2, 4), (6, 8)))
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.errors import PlanError

Pieces = tuple[tuple[int, int], ...]
"""Half-open index ranges along one dimension, in the order of the local tensor."""


def length(pieces: Iterable[tuple[int, int]]) -> int:
    """Returns the number of indices that `pieces` hold together."""
    return sum(stop - start for start, stop in pieces)


def joined(pieces: Iterable[tuple[int, int]]) -> Pieces:
    """Returns `pieces` without empty ones and with neighbours `(a, b), (b, c)` made one.

    The order is kept, so the joined pieces name the same indices in the same order.
    """
    result: list[tuple[int, int]] = []
    for start, stop in pieces:
        if start >= stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def inside(pieces: Iterable[tuple[int, int]], start: int, stop: int) -> Pieces:
    """Returns the part of `pieces` that lies in `[start, stop)`, counted from `start`.

    This is how a slice of a concatenation becomes slices of its parts.
    """
    cut = ((max(a, start) - start, min(b, stop) - start) for a, b in pieces)
    return tuple((a, b) for a, b in cut if a < b)


def taken(outer: Iterable[tuple[int, int]], inner: Iterable[tuple[int, int]]) -> Pieces:
    """Returns the pieces `inner` of the sequence that `outer` names, as pieces of the whole.

    >>> taken(((0, 2), (4, 6)), ((1, 3),))
    ((1, 2), (4, 5))
    """
    outer = tuple(outer)
    result: list[tuple[int, int]] = []
    for start, stop in inner:
        position = 0
        for a, b in outer:
            low, high = max(start, position), min(stop, position + b - a)
            if low < high:
                result.append((a + low - position, a + high - position))
            position += b - a
    return joined(result)


@dataclass(frozen=True)
class ParamLayout:
    """How one tensor lies on the ranks of one axis.

    Args:
        shape: Shape of the whole tensor.
        dim: The split dimension, counted from 0, or None where every rank holds the whole.
        pieces: Pieces of each rank along `dim`, one entry a rank; empty where `dim` is None.
        shared: Whether an index may be held by more than one rank (a key/value head that several
            ranks use), or more than once by one rank.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[Pieces, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if self.dim is None:
            object.__setattr__(self, "pieces", ())
            return
        object.__setattr__(self, "dim", _dim(self.dim, self.shape))
        ranks = (tuple((int(a), int(b)) for a, b in rank) for rank in self.pieces)
        object.__setattr__(self, "pieces", tuple(ranks))

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks of the axis, or None for a tensor that is not split."""
        return None if self.dim is None else len(self.pieces)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The local size along `dim` of each rank; empty where the tensor is not split."""
        return tuple(length(rank) for rank in self.pieces)

    def pieces_of(self, rank: int) -> Pieces:
        """Returns the pieces of `rank` along `dim`; no pieces where the tensor is not split."""
        return () if self.dim is None else self.pieces[rank]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the tensor that `rank` holds."""
        if self.dim is None:
            return self.shape
        size = length(self.pieces[rank])
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Returns the number of elements that `rank` holds."""
        return math.prod(self.local_shape(rank))

    def problems(self) -> list[str]:
        """Returns what keeps the pieces of all ranks from tiling the tensor; empty when they do.

        Every index must be held by exactly one rank, or by at least one where `shared` is set.
        """
        if self.dim is None:
            return []
        size = self.shape[self.dim]
        found = [
            f"rank {rank} asks for [{a}, {b}) of dim {self.dim}, which has {size}"
            for rank, pieces in enumerate(self.pieces)
            for a, b in pieces
            if not 0 <= a <= b <= size
        ]
        held = sorted((a, b, rank) for rank, ps in enumerate(self.pieces) for a, b in ps if a < b)
        covered, last = 0, None
        for a, b, rank in held:
            if a > covered:
                found.append(f"no rank holds [{covered}, {a}) of dim {self.dim}")
            elif a < covered and not self.shared:
                found.append(
                    f"[{a}, {min(b, covered)}) of dim {self.dim} is held twice, "
                    f"by rank {last} and rank {rank}"
                )
            if b > covered:
                covered, last = b, rank
        if covered < size:
            found.append(f"no rank holds [{covered}, {size}) of dim {self.dim}")
        return found


def whole(shape: Sequence[int]) -> ParamLayout:
    """Returns the layout in which every rank holds the whole tensor."""
    return ParamLayout(tuple(shape))


def even(shape: Sequence[int], dim: int, n: int) -> ParamLayout:
    """Returns the layout of an ordinary shard: `n` ranks, `ceil(size / n)` each, the rest last.

    The cuts are those of `torch.chunk` and of DTensor's `Shard(dim)`: the last ranks may hold less
    than the others, or nothing.

    Args:
        shape: Shape of the whole tensor.
        dim: The dimension to split; negative counts from the end.
        n: Number of ranks.
    """
    dim = _dim(dim, shape)
    return packed(shape, dim, n, (shape[dim],))


def packed(
    shape: Sequence[int], dim: int, n: int, sections: Sequence[int], unit: int = 1
) -> ParamLayout:
    """Returns the layout in which each rank holds its share of every section of a packed tensor.

    Args:
        shape: Shape of the whole tensor.
        dim: The dimension along which the sections lie; negative counts from the end.
        n: Number of ranks.
        sections: Size of every section; they add up to `shape[dim]`. Each is cut as in `even`.
        unit: Indices that stay together.

    Raises:
        PlanError: The sections do not add up, or `n` is below 1.
    """
    dim = _dim(dim, shape)
    if n < 1:
        raise PlanError(f"Split dim {dim} of shape {tuple(shape)} over {n} ranks.", "n must be ≥ 1")
    if sum(sections) != shape[dim] or min(sections, default=0) < 0:
        raise PlanError(
            f"Split dim {dim} of shape {tuple(shape)} in sections {tuple(sections)}.",
            f"the sections add up to {sum(sections)}, but the dimension has {shape[dim]}",
        )
    starts = [sum(sections[:i]) for i in range(len(sections))]
    ranks = []
    for rank in range(n):
        cuts = (_chunk(size, rank, n, unit) for size in sections)
        ranks.append(joined((at + a, at + b) for at, (a, b) in zip(starts, cuts, strict=True)))
    return ParamLayout(tuple(shape), dim, tuple(ranks))


def _chunk(size: int, rank: int, n: int, unit: int = 1) -> tuple[int, int]:
    """The range of `rank` when `size` indices are cut in `n` chunks as `torch.chunk` does."""
    step = -(-size // (n * unit)) * unit
    return min(rank * step, size), min((rank + 1) * step, size)


def aligned(
    shape: Sequence[int], dim: int, n: int, sections: Sequence[int], itemsize: int
) -> ParamLayout | None:
    """Returns the layout of stacked experts whose slices keep rows of whole 16 bytes, or None.

    Kernels for grouped products want that. None: an ordinary cut has such rows, or the sections
    themselves have not, or there are fewer than 16 bytes for every rank, or the tensor is no stack.

    Args:
        shape: Shape of the whole tensor: `[experts, …, …]`.
        dim: The dimension that is cut.
        n: Number of ranks.
        sections: Size of every packed section along `dim`; `(shape[dim],)` where there is one.
        itemsize: Bytes of one element.
    """
    unit = 16 // itemsize if itemsize in (2, 4) else 1
    if len(shape) < 3 or unit == 1 or any(size % unit or size < n * unit for size in sections):
        return None
    if all(size % (n * unit) == 0 for size in sections):
        return None
    return packed(shape, dim, n, sections, unit)


def _dim(dim: int, shape: Sequence[int]) -> int:
    """`dim` counted from 0, checked against `shape`."""
    if not -len(shape) <= dim < len(shape):
        raise PlanError(
            f"Split dim {dim} of shape {tuple(shape)}.",
            f"the tensor has {len(shape)} dimensions",
        )
    return dim % len(shape)
