"""Which rank computes which attention heads: whole heads only, for any counts and any ranks.

Query head `h` of `H` meets key/value head `h // (H / K)` of `K`. A rank computes a stretch of query
heads and needs every key/value head that one of them meets; a key/value head that several ranks
need is *shared*.

    >>> print(head_map(9, 3, 2))
    rank 0: query 0-4 · key/value 0-1
    rank 1: query 5-8 · key/value 1-2
"""

from dataclasses import dataclass
from functools import lru_cache

from plait.errors import LayoutError


@dataclass(frozen=True)
class HeadMap:
    """The heads of one attention on every rank.

    Attributes:
        num_heads: Query heads of the whole model.
        num_kv_heads: Its key/value heads; they divide `num_heads`.
        query: Per rank, the query heads it computes, ascending; each head is on one rank.
        kv: Per rank, the key/value heads it needs, ascending.
    """

    num_heads: int
    num_kv_heads: int
    query: tuple[tuple[int, ...], ...]
    kv: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> int:
        """Query heads of the whole model that meet one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.query)

    @property
    def is_shared(self) -> bool:
        """Whether some key/value head is needed by more than one rank."""
        return sum(len(heads) for heads in self.kv) > self.num_kv_heads

    def local_group(self, rank: int) -> int:
        """Places for query heads that `rank` gives each of its key/value heads."""
        return max(len(self._meeting(rank, kv)) for kv in self.kv[rank])

    def places(self, rank: int) -> tuple[int, ...]:
        """The query heads of `rank` in the places that its attention computes.

        Attention wants the same number of query heads for every key/value head. Where a rank has
        fewer for one of them, the last one is computed again; what comes out there is dropped.

        >>> head_map(9, 3, 2).places(0)
        (0, 1, 2, 3, 4, 4)
        """
        size = self.local_group(rank)
        found: list[int] = []
        for kv in self.kv[rank]:
            heads = self._meeting(rank, kv)
            found += heads + [heads[-1]] * (size - len(heads))
        return tuple(found)

    def _meeting(self, rank: int, kv: int) -> list[int]:
        return [head for head in self.query[rank] if head // self.group == kv]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: query {_span(query)} · key/value {_span(kv)}"
            for rank, (query, kv) in enumerate(zip(self.query, self.kv, strict=True))
        )


@dataclass(frozen=True)
class Attention:
    """One attention whose heads a plan splits.

    Attributes:
        name: Its module: the one that holds the query projection, or the fused one.
        qk_dim: Features of one query or key head.
        v_dim: Features of one value head.
        heads: Which rank has which heads.
    """

    name: str
    qk_dim: int
    v_dim: int
    heads: HeadMap


@lru_cache(maxsize=4096)
def head_map(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadMap:
    """Which heads each rank computes.

    Of two ways to cut the query heads into stretches, the one is taken whose busiest rank has less
    to project, counting a query head (q and o) and a key/value head (k and v) as one each: into
    stretches that differ by one head at most, placed so that they need few key/value heads; or
    along the borders of the key/value heads. The first is taken where both cost the same.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        num_ranks: Ranks to split over.

    Raises:
        LayoutError: A count below 1, key/value heads that do not divide the query heads, or more
            ranks than query heads.
    """
    problems = []
    if min(num_heads, num_kv_heads, num_ranks) < 1:
        problems.append("every count is at least 1")
    elif num_heads % num_kv_heads:
        problems.append(f"{num_heads} query heads % {num_kv_heads} key/value heads ≠ 0")
    elif num_ranks > num_heads:
        problems.append(
            f"{num_ranks} ranks for {num_heads} query heads: a rank computes one or more"
        )
    if problems:
        raise LayoutError(
            f"Heads of an attention with {num_heads} query and {num_kv_heads} key/value heads over "
            f"{num_ranks} ranks:",
            problems,
            [f"tp_size of at most {num_heads}", "the style 'replicate' for this attention"],
        )
    group = num_heads // num_kv_heads
    level = _map(_level_sizes(num_heads, group, num_ranks), num_heads, num_kv_heads)
    along = _map(_aligned_sizes(num_heads, num_kv_heads, num_ranks), num_heads, num_kv_heads)
    return along if _busiest(along) < _busiest(level) else level


def _busiest(heads: HeadMap) -> int:
    return max(len(q) + len(kv) for q, kv in zip(heads.query, heads.kv, strict=True))


def _map(sizes: list[int], num_heads: int, num_kv_heads: int) -> HeadMap:
    group, start = num_heads // num_kv_heads, 0
    query, kv = [], []
    for size in sizes:
        heads = tuple(range(start, start + size))
        query.append(heads)
        kv.append(tuple(sorted({head // group for head in heads})))
        start += size
    return HeadMap(num_heads, num_kv_heads, tuple(query), tuple(kv))


def _shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` numbers that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _aligned_sizes(num_heads: int, num_kv_heads: int, num_ranks: int) -> list[int]:
    """Stretches that begin and end with a key/value head, or lie inside of one."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        return [share * group for share in _shares(num_kv_heads, num_ranks)]
    shares = _shares(num_ranks, num_kv_heads)
    if max(shares) > group:  # more ranks on one key/value head than query heads that meet it
        return _shares(num_heads, num_ranks)
    return [size for ranks in shares for size in _shares(group, ranks)]


def _level_sizes(num_heads: int, group: int, num_ranks: int) -> list[int]:
    """Stretches that differ by one head at most, with the fewest key/value heads in all.

    A shortest path: after `rank` stretches of which `large` are one head longer, the best that the
    rest can cost is known.
    """
    small, num_large = divmod(num_heads, num_ranks)

    def met(start: int, size: int) -> int:
        return (start + size - 1) // group - start // group + 1

    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for rank in range(num_ranks):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for large, (most, total, sizes) in best.items():
            start = rank * small + large
            for more in (1, 0):
                if large + more > num_large or num_large - large - more > num_ranks - rank - 1:
                    continue
                size = small + more
                needs = met(start, size)
                found = (max(most, size + needs), total + needs, (*sizes, size))
                known = following.get(large + more)
                if known is None or found[:2] < known[:2]:
                    following[large + more] = found
        best = following
    return list(best[num_large][2])


def _span(heads: tuple[int, ...]) -> str:
    return str(heads[0]) if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"
