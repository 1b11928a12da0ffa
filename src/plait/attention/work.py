"""From a description of a mask to the blocks that have to be computed, and no others."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from plait.attention.masks import MaskSpec
from plait.attention.spans import Tokens

Kind = Literal["full", "causal", "masked"]
_LEAST_TILE, _BLOCK_TILE = 64, 256


@dataclass(frozen=True, eq=False)
class Job:
    """One block of scores.

    Attributes:
        rows: The sequences it is of; None: all.
        q: Its queries among those that the rank holds: (start, stop).
        k: Its keys among those that are here, likewise.
        kind: "full": every query sees every key; "causal": as many queries as keys, the i-th sees
            the first i + 1; "masked": as `mask` says.
        mask: `[1, q, k]` bool, for "masked".
    """

    rows: tuple[int, ...] | None
    q: tuple[int, int]
    k: tuple[int, int]
    kind: Kind
    mask: Tensor | None = None

    @property
    def area(self) -> int:
        """Scores that are computed, of one sequence."""
        size = self.q[1] - self.q[0]
        return size * (size + 1) // 2 if self.kind == "causal" else size * (self.k[1] - self.k[0])


@dataclass(frozen=True, eq=False)
class Work:
    """The blocks of some queries and some keys.

    Attributes:
        jobs: The blocks; no two hold the same pair of a query and a key.
        batch: Number of sequences.
    """

    jobs: tuple[Job, ...]
    batch: int

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return not self.jobs

    @cached_property
    def area(self) -> int:
        """Scores that are computed, of all sequences."""
        rows = (self.batch if job.rows is None else len(job.rows) for job in self.jobs)
        return sum(job.area * count for job, count in zip(self.jobs, rows, strict=True))


def work_of(spec: MaskSpec, q: Tokens, k: Tokens, batch: int) -> Work:
    """The blocks that queries at some places have to compute with keys at others.

    Documents become blocks of their own, windows bands of tiles, and what nobody sees is left out.

    Args:
        spec: The mask.
        q: Places of the queries.
        k: Places of the keys.
        batch: Number of sequences.

    Returns:
        The blocks, remembered in the description.
    """
    key = (q, k, batch)
    known: Work | None = spec._rows.get(key)
    if known is None:
        jobs = []
        for rows in spec.alike(batch):
            which = None if len(rows) == batch else rows
            for q_at, q_run in _placed(q):
                for k_at, k_run in _placed(k):
                    for block in _blocks(spec, rows[0], q_run, k_run):
                        job = _job(spec, which, block, (q_at - q_run[0], k_at - k_run[0]))
                        jobs += [job] if job is not None else []
        known = spec._rows[key] = Work(tuple(jobs), batch)
    return known


Run = tuple[int, int]
Block = tuple[Run, Run, Kind]


def _placed(tokens: Tokens) -> Iterator[tuple[int, Run]]:
    """Each run, with where it begins among the held tokens."""
    at = 0
    for run in tokens.runs:
        yield at, run
        at += run[1] - run[0]


def _blocks(spec: MaskSpec, row: int, q: Run, k: Run) -> Iterator[Block]:
    """Blocks of one stretch of queries and one of keys, in places of the whole sequence."""
    if spec.blocks is not None:
        yield from _tiles(q, k, _BLOCK_TILE)
        return
    pieces = [(q, k)]
    if spec.segments is not None:
        pieces = list(_same(spec.runs("segments", row), q, k))
    for q_part, k_part in pieces:
        for keys, holes in _valid(spec, row, k_part):
            if holes:
                yield from _tiles(q_part, keys, _BLOCK_TILE)
            elif spec.window is not None:
                yield from _band(spec, q_part, keys)
            elif spec.causal:
                yield from _triangle(q_part, keys)
            else:
                yield q_part, keys, "full"


def _same(runs: list[tuple[int, int, int]], q: Run, k: Run) -> Iterator[tuple[Run, Run]]:
    """For each segment, its queries and its keys."""
    for start, stop, _ in runs:
        here = (max(start, q[0]), min(stop, q[1]))
        there = (max(start, k[0]), min(stop, k[1]))
        if here[0] < here[1] and there[0] < there[1]:
            yield here, there


def _valid(spec: MaskSpec, row: int, k: Run) -> Iterator[tuple[Run, bool]]:
    """The stretch of keys that are there, and whether some among them are not."""
    if spec.valid is None:
        yield k, False
        return
    runs = [
        (max(a, k[0]), min(b, k[1]))
        for a, b, there in spec.runs("valid", row)
        if there and max(a, k[0]) < min(b, k[1])
    ]
    if len(runs) <= 4:
        yield from ((run, False) for run in runs)
    else:
        yield (runs[0][0], runs[-1][1]), True


def _triangle(q: Run, k: Run) -> Iterator[Block]:
    """Causal blocks: what lies behind all queries, and the diagonal."""
    low, high = max(q[0], k[0]), min(q[1], k[1])
    if k[0] < min(k[1], q[0]):  # keys before the first query
        yield q, (k[0], min(k[1], q[0])), "full"
    if low < high:
        yield (low, high), (low, high), "causal"
        if high < q[1]:
            yield (high, q[1]), (low, high), "full"


def _band(spec: MaskSpec, q: Run, k: Run) -> Iterator[Block]:
    """Tiles along the diagonal, as far as the window reaches."""
    window = spec.window or 0
    reach = window - 1 if spec.causal else window
    if spec.causal and q[1] - min(k[0], q[0]) <= window:
        yield from _triangle(q, k)
        return
    tile = max(_LEAST_TILE, window // 2)
    for start in range(q[0], q[1], tile):
        stop = min(start + tile, q[1])
        first = max(k[0], start - reach)
        last = min(k[1], stop if spec.causal else stop + reach)
        if first < last:
            yield (start, stop), (first, last), "masked"


def _tiles(q: Run, k: Run, size: int) -> Iterator[Block]:
    for q_start in range(q[0], q[1], size):
        for k_start in range(k[0], k[1], size):
            here = (q_start, min(q_start + size, q[1]))
            yield here, (k_start, min(k_start + size, k[1])), "masked"


def _job(
    spec: MaskSpec, rows: tuple[int, ...] | None, block: Block, shift: tuple[int, int]
) -> Job | None:
    """A block among the tokens that are held; None where nobody sees anything in it."""
    q, k, kind = block
    here = (q[0] + shift[0], q[1] + shift[0])
    there = (k[0] + shift[1], k[1] + shift[1])
    if kind != "masked":
        return Job(rows, here, there, kind)
    device = next(
        (x.device for x in (spec.segments, spec.valid, spec.blocks) if x is not None), None
    )
    one = torch.tensor(rows[:1] if rows else [0])  # the others are alike
    mask = spec.dense(torch.arange(*q, device=device), torch.arange(*k, device=device), one)
    if bool(mask.all()):
        return Job(rows, here, there, "full")
    return Job(rows, here, there, "masked", mask) if bool(mask.any()) else None
