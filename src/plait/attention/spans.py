"""Which tokens of a sequence each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Tokens:
    """Tokens of a sequence, in the order in which a rank holds them.

    Attributes:
        runs: Stretches of places: (start, stop).
    """

    runs: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def index(self) -> torch.Tensor:
        """`[tokens]`, the place of each in the whole sequence."""
        parts = [torch.arange(start, stop) for start, stop in self.runs]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def part(self, start: int, stop: int) -> "Tokens":
        """Those from the `start`-th held one to before the `stop`-th."""
        found, at = [], 0
        for first, last in self.runs:
            low, high = max(first, first + start - at), min(last, first + stop - at)
            if low < high:
                found.append((low, high))
            at += last - first
        return Tokens(tuple(found))


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Several holdings, one after the other; runs that touch become one."""
    found: list[tuple[int, int]] = []
    for start, stop in (run for part in parts for run in part.runs):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return Tokens(tuple(found))


def _stretches(length: int, count: int) -> list[tuple[int, int]]:
    """Nearly equal stretches, the longer ones first."""
    size, more = divmod(length, count)
    ends = [0]
    for place in range(count):
        ends.append(ends[-1] + size + (place < more))
    return list(pairwise(ends))


def plain(length: int, num_ranks: int) -> tuple[Tokens, ...]:
    """Each rank's tokens where each holds one stretch."""
    return tuple(Tokens((run,) if run[0] < run[1] else ()) for run in _stretches(length, num_ranks))


def zigzag(length: int, num_ranks: int) -> tuple[Tokens, ...]:
    """Each rank's tokens where causal work is to be the same for all.

    Of twice as many stretches as ranks, rank `r` holds the `r`-th from the front and the `r`-th
    from the end.
    """
    runs = _stretches(length, 2 * num_ranks)
    return tuple(
        Tokens(tuple(run for run in (runs[rank], runs[-1 - rank]) if run[0] < run[1]))
        for rank in range(num_ranks)
    )


@lru_cache(maxsize=256)
def places_of(length: int, cp_size: int, sp_size: int) -> tuple[Tokens, ...]:
    """Which tokens each rank holds of sequences that cp × sp ranks share.

    Between the ranks of a ring (cp) in zig-zag order, in plain order if there are fewer than two
    tokens for each; what falls to one place of the ring is dealt out in plain order to the ranks
    that exchange heads (sp).

    Args:
        length: Of the whole sequences.
        cp_size: Ranks of the ring.
        sp_size: Ranks that exchange heads, inside each place of the ring.

    Returns:
        For each of the cp × sp ranks, sp fastest, its tokens.
    """
    is_long = cp_size > 1 and length >= 2 * cp_size
    outer = zigzag(length, cp_size) if is_long else plain(length, cp_size)
    return tuple(
        held.part(start, stop) for held in outer for start, stop in _stretches(len(held), sp_size)
    )
