"""Where a dimension made of heads is cut: what each rank works on, and what it stores.

Every fused layout is a sequence of *runs*: this many features of that query head, then this many of
that key/value head. A rank's features are the runs of its own heads, in the same order, so that the
model's own `view`, `split` or `chunk` stays right with local counts.

A run that several ranks work on is stored once: its features are divided among these ranks, and
gathered when they are used. So norms, optimizers and checkpoints meet every element once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from plait.plan.heads import HeadMap
from plait.plan.intervals import ParamLayout, Pieces, even, joined


@dataclass(frozen=True)
class Run:
    """Neighbouring features of one head.

    Attributes:
        kind: `"q"`: of a query head; `"kv"`: of a key/value head.
        head: Number of the head in the whole model.
        size: Number of features.
    """

    kind: Literal["q", "kv"]
    head: int
    size: int


@dataclass(frozen=True)
class Cut:
    """How one dimension lies on the ranks of the axis.

    Attributes:
        size: Features of the whole dimension.
        need: Per rank, the ranges it works on, in the order of its local tensor.
        owned: Per rank, the ranges it stores; those of all ranks tile the dimension once.
        places: Per rank, ranges of its local features that, one after another, are what the
            model's attention sees (some twice); None where it sees them as they are.
        real: Per rank, the ranges of what the attention sees that are not repeated: the inverse.
    """

    size: int
    need: tuple[Pieces, ...]
    owned: tuple[Pieces, ...]
    places: tuple[Pieces | None, ...]
    real: tuple[Pieces | None, ...]

    @cached_property
    def is_shared(self) -> bool:
        """Whether some rank works on features that another one stores."""
        return self.need != self.owned

    @property
    def is_padded(self) -> bool:
        """Whether some rank's attention sees a head twice."""
        return any(places is not None for places in self.places)

    @cached_property
    def is_even(self) -> bool:
        """Whether the stored ranges are those of an ordinary shard."""
        return self.owned == even((self.size,), 0, len(self.owned)).pieces

    def layout(self, shape: Sequence[int], dim: int) -> ParamLayout:
        """How a tensor lies whose dimension `dim` is this one."""
        return ParamLayout(tuple(shape), dim, self.owned)


def cut(runs: Sequence[Run], heads: HeadMap) -> Cut:
    """Cut a dimension that consists of `runs` as `heads` says."""
    need, places, real = [], [], []
    for rank in range(heads.num_ranks):
        need.append(_needed(runs, heads, rank))
        seen, originals = _places(runs, heads, rank)
        places.append(seen)
        real.append(originals)
    size = sum(run.size for run in runs)
    return Cut(size, tuple(need), _owned(size, need), tuple(places), tuple(real))


def _needed(runs: Sequence[Run], heads: HeadMap, rank: int) -> Pieces:
    mine = {"q": set(heads.query[rank]), "kv": set(heads.kv[rank])}
    position, found = 0, []
    for run in runs:
        if run.head in mine[run.kind]:
            found.append((position, position + run.size))
        position += run.size
    return joined(found)


def _places(runs: Sequence[Run], heads: HeadMap, rank: int) -> tuple[Pieces | None, Pieces | None]:
    wanted = heads.places(rank)
    if len(wanted) == len(heads.query[rank]):
        return None, None
    mine = {"q": set(heads.query[rank]), "kv": set(heads.kv[rank])}
    local, seen = 0, 0
    found, originals = [], []
    for run in runs:
        if run.head not in mine[run.kind]:
            continue
        times = wanted.count(run.head) if run.kind == "q" else 1
        found += [(local, local + run.size)] * times
        originals.append((seen, seen + run.size))
        local += run.size
        seen += run.size * times
    if seen == local:  # key/value heads only
        return None, None
    return joined(found), joined(originals)


def _owned(size: int, need: Sequence[Pieces]) -> tuple[Pieces, ...]:
    """Each index on one of the ranks that need it; a stretch of several is divided evenly."""
    borders = sorted({0, size} | {at for pieces in need for piece in pieces for at in piece})
    owner: list[tuple[int, int, int]] = []
    for start, stop in pairwise(borders):
        ranks = [
            rank
            for rank, pieces in enumerate(need)
            if any(a <= start and stop <= b for a, b in pieces)
        ]
        assert ranks, "every head is on a rank"
        step, extra = divmod(stop - start, len(ranks))
        position = start
        for order, rank in enumerate(ranks):
            width = step + (order < extra)
            owner.append((position, position + width, rank))
            position += width
    found = []
    for rank, pieces in enumerate(need):
        mine = []
        for a, b in pieces:  # in the order of the local tensor
            mine += [(s, e) for s, e, r in owner if r == rank and a <= s and e <= b and s < e]
        found.append(joined(mine))
    return tuple(found)


def one_kind(kind: Literal["q", "kv"], num_heads: int, size: int) -> tuple[Run, ...]:
    """The runs of a dimension with `size` features of every head, one head after another."""
    return tuple(Run(kind, head, size) for head in range(num_heads))


def sections(heads: HeadMap, qk_dim: int, v_dim: int) -> tuple[Run, ...]:
    """The runs of a fused `[q | k | v]`, each head after head."""
    return (
        one_kind("q", heads.num_heads, qk_dim)
        + one_kind("kv", heads.num_kv_heads, qk_dim)
        + one_kind("kv", heads.num_kv_heads, v_dim)
    )


def per_group(heads: HeadMap, qk_dim: int, v_dim: int) -> tuple[Run, ...]:
    """The runs of a fused weight with, for each key/value head, its query heads, its k, its v."""
    runs: list[Run] = []
    for kv in range(heads.num_kv_heads):
        runs += [Run("q", kv * heads.group + i, qk_dim) for i in range(heads.group)]
        runs += [Run("kv", kv, qk_dim), Run("kv", kv, v_dim)]
    return tuple(runs)
