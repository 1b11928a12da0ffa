"""What a query may attend to, as a description in coordinates of the whole sequence."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Which keys each query of some sequences sees; never a square tensor.

    A query at place `q` sees the key at place `k` where all of this holds: `k <= q` if `causal`;
    within the window; the same segment; the key is valid. Tokens of one block see each other
    whatever the first three say.

    Attributes:
        causal: Whether nobody looks ahead.
        window: How far a query looks back: `q - k < window`; where it is not causal, how far it
            looks both ways: `|q - k| <= window`. None: without end. (The two are the definitions of
            transformers.)
        segments: `[batch, seq]`, the number of the document or chunk that a token is of, which
            never falls along a sequence. None: one segment.
        valid: `[batch, seq]`, False where a token is padding that nobody looks at. None: all are.
        blocks: `[batch, seq]`, the number of the block that a token is of, below 0 for none (an
            image among text, whose tokens see each other). None: there are no blocks.
    """

    causal: bool = True
    window: int | None = None
    segments: Tensor | None = None
    valid: Tensor | None = None
    blocks: Tensor | None = None
    _rows: dict[Any, Any] = field(default_factory=dict, repr=False)

    def dense(self, q_index: Tensor, k_index: Tensor, rows: Tensor | None = None) -> Tensor:
        """The description as a table.

        Args:
            q_index: `[q]`, places of queries.
            k_index: `[k]`, places of keys.
            rows: Which sequences; None: all.

        Returns:
            `[batch, q, k]` bool, True where the query sees the key; batch 1 where all sequences are
            alike.
        """
        q, k = q_index[:, None], k_index[None, :]
        seen = torch.ones(1, len(q_index), len(k_index), dtype=torch.bool, device=q.device)
        if self.causal:
            seen = seen & (k <= q)
        if self.window is not None:
            near = q - k < self.window if self.causal else (q - k).abs() <= self.window
            seen = seen & near
        if self.segments is not None:
            of = _taken(self.segments, rows)
            seen = seen & (of[:, q_index, None] == of[:, None, k_index])
        if self.blocks is not None:
            of = _taken(self.blocks, rows)
            here = of[:, q_index, None]
            seen = seen | ((here == of[:, None, k_index]) & (here >= 0))
        if self.valid is not None:
            seen = seen & _taken(self.valid, rows)[:, None, k_index]
        return seen

    def alike(self, batch: int) -> list[tuple[int, ...]]:
        """The sequences in groups that are described alike."""
        known: list[tuple[int, ...]] | None = self._rows.get("alike")
        if known is None:
            parts = [x for x in (self.segments, self.valid, self.blocks) if x is not None]
            groups: dict[bytes, list[int]] = {}
            told = torch.stack([x.long() for x in parts], 1).cpu() if parts else None
            for row in range(batch):
                key = b"" if told is None else told[row].contiguous().numpy().tobytes()
                groups.setdefault(key, []).append(row)
            known = self._rows["alike"] = [tuple(rows) for rows in groups.values()]
        return known

    def runs(self, name: str, row: int) -> list[tuple[int, int, int]]:
        """Stretches of one value in `segments` or `valid`: start, stop, value."""
        known: list[tuple[int, int, int]] | None = self._rows.get((name, row))
        if known is None:
            values = getattr(self, name)[row].long().cpu()
            ends = (torch.nonzero(values[1:] != values[:-1]).flatten() + 1).tolist()
            starts = [0, *ends]
            stops = [*ends, len(values)]
            at = values[starts].tolist()
            known = [(a, b, int(v)) for a, b, v in zip(starts, stops, at, strict=True)]
            self._rows[(name, row)] = known
        return known


def _taken(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows.to(x.device))


def segments_of(documents: Tensor | None, chunks: Tensor | None) -> Tensor | None:
    """Documents and chunks as one numbering: a new segment begins where either does.

    Args:
        documents: `[batch, seq]`, or None.
        chunks: `[batch, seq]`, or None.

    Returns:
        `[batch, seq]`, counted from 0; None where both are None.
    """
    parts = [x for x in (documents, chunks) if x is not None]
    if not parts:
        return None
    begins = torch.stack([x[:, 1:] != x[:, :-1] for x in parts]).any(0)
    return torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
