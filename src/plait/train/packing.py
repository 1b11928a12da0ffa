"""Documents into rows of tokens, with their borders kept.

Several documents share a row, so that no place in it is wasted. The borders are in `position_ids`,
which start again at 0 with every document: transformers builds its masks from them, so that no
token attends to another document. It does so where there is neither an `attention_mask` nor a
cache, therefore rows come without the first, and the model must be called with `use_cache=False`.
No label crosses a border either: the first token of each document, which nothing before it can
predict, has the label -100.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED = -100
"""The label of a token that isn't learned."""

Lengths = Sequence[int] | np.ndarray
Span = tuple[int, int, int]
"""A piece of a document: its number, first token, and the token after the last."""


class Documents(Protocol):
    """Documents of tokens: what [`prepare`][plait.train.text.prepare] makes."""

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each."""

    @property
    def masked(self) -> bool:
        """Whether some tokens are no labels."""

    def piece(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids and labels of a part of one, `[stop - start]` each."""


@dataclass(frozen=True)
class Plan:
    """Which pieces of documents make up each row.

    Attributes:
        rows: The pieces of each row, in order.
        dropped_tokens: Tokens of documents longer than a row that are in none.
    """

    rows: list[list[Span]]
    dropped_tokens: int = 0


def cut(lengths: Lengths, order: Sequence[int], seq_length: int) -> Plan:
    """Documents one after the other, cut where a row is full; no place is left but in the last.

    What is cut off goes on in the next row as if it were a document of its own.

    Args:
        lengths: Tokens of each document.
        order: Numbers of documents, in the order in which they are laid down.
        seq_length: Tokens of a row.
    """
    rows: list[list[Span]] = []
    free = 0
    for document in order:
        start, length = 0, int(lengths[document])
        while start < length:
            if free == 0:
                rows.append([])
                free = seq_length
            taken = min(free, length - start)
            rows[-1].append((int(document), start, start + taken))
            start, free = start + taken, free - taken
    return Plan(rows)


def whole(lengths: Lengths, order: Sequence[int], seq_length: int) -> Plan:
    """Documents in one piece each, each in the fullest row that still has room for it.

    Of a document longer than a row, what is beyond the row is dropped.

    Args:
        lengths: Tokens of each document.
        order: Numbers of documents, in the order in which they are laid down.
        seq_length: Tokens of a row.

    Source: best fit, on line; Johnson et al., Worst-Case Performance Bounds for Simple
        One-Dimensional Packing Algorithms (1974).
    """
    rows: list[list[Span]] = []
    open_rows: list[tuple[int, int]] = []  # (free places, row), sorted
    dropped = 0
    for document in order:
        length = int(lengths[document])
        dropped += max(0, length - seq_length)
        length = min(length, seq_length)
        at = bisect.bisect_left(open_rows, (length, -1))
        if at == len(open_rows):
            rows.append([])
            free, row = seq_length, len(rows) - 1
        else:
            free, row = open_rows.pop(at)
        rows[row].append((int(document), 0, length))
        if free > length:
            bisect.insort(open_rows, (free - length, row))
    return Plan(rows, dropped)


def single(lengths: Lengths, order: Sequence[int], seq_length: int) -> Plan:
    """One document a row; what is beyond `seq_length` tokens is dropped.

    Args:
        lengths: Tokens of each document.
        order: Numbers of documents, in the order of the rows.
        seq_length: Tokens of a row.
    """
    rows = [[(int(n), 0, min(int(lengths[n]), seq_length))] for n in order]
    dropped = sum(max(0, int(lengths[n]) - seq_length) for n in order)
    return Plan(rows, dropped)


WAYS = {"cut": cut, "whole": whole, "none": single}
"""Ways of filling rows, by the name that a recipe uses."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, made when they are asked for.

    Rows in which there is nothing to learn are left out: a batch without a label has no loss.

    Args:
        documents: The documents.
        seq_length: Tokens of a row.
        packing: A key of `WAYS`.
        order: Numbers of documents in the order in which they are laid down; None: all, as they
            are.
        pad_token: Id for places that no document fills.
    """

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        packing: str,
        order: Sequence[int] | None = None,
        pad_token: int = 0,
    ) -> None:
        lengths = documents.lengths
        self.documents = documents
        self.seq_length = seq_length
        self.packed = packing != "none"
        self.pad_token = pad_token
        plan = WAYS[packing](lengths, range(len(lengths)) if order is None else order, seq_length)
        self.dropped_tokens = plan.dropped_tokens
        self.plan = [row for row in plan.rows if any(self._learns(span) for span in row)]
        self.empty_rows = len(plan.rows) - len(self.plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, and for a packed row `position_ids` too, `[length]` each.

        A packed row has `seq_length` tokens; one document has its own number.
        """
        pieces = [self.documents.piece(*span) for span in self.plan[row]]
        ids = [part for part, _ in pieces]
        labels = [_without_first(part) for _, part in pieces]
        positions = [np.arange(len(part)) for part, _ in pieces]
        free = self.seq_length - sum(len(part) for part in ids)
        if self.packed and free:
            ids.append(np.full(free, self.pad_token))
            labels.append(np.full(free, IGNORED))
            positions.append(np.arange(free))
        made = {"input_ids": ids, "labels": labels}
        if self.packed:
            made["position_ids"] = positions
        return {
            name: torch.from_numpy(np.concatenate(x).astype(np.int64)) for name, x in made.items()
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of documents in all rows."""
        return sum(stop - start for row in self.plan for _, start, stop in row)

    def _learns(self, span: Span) -> bool:
        if not self.documents.masked:
            return span[2] - span[1] > 1
        _, labels = self.documents.piece(*span)
        return bool((labels[1:] != IGNORED).any())


def _without_first(labels: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(1, IGNORED), labels[1:]])


class Collate:
    """Rows into a batch; rows of unequal length are padded on the right.

    Args:
        pad_token: Id for the places after a row's end.
    """

    def __init__(self, pad_token: int = 0) -> None:
        self.pad_token = pad_token

    def __call__(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """`[rows, length]` of each; with an `attention_mask` where rows carry no positions."""
        fill = {"input_ids": self.pad_token, "labels": IGNORED, "position_ids": 0}
        batch = {
            name: torch.nn.utils.rnn.pad_sequence(
                [row[name] for row in rows], batch_first=True, padding_value=fill[name]
            )
            for name in rows[0]
        }
        if "position_ids" not in batch:
            lengths = torch.tensor([len(row["input_ids"]) for row in rows])
            places = torch.arange(batch["input_ids"].shape[1])
            batch["attention_mask"] = (places[None] < lengths[:, None]).long()
        return batch


def empty_like(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row of the same form with nothing to learn, for a rank that has no row left."""
    return {**row, "labels": torch.full_like(row["labels"], IGNORED)}


def num_labels(batch: dict[str, torch.Tensor]) -> int:
    """The tokens of a batch that are learned: labels after the shift by one place."""
    return int((batch["labels"][..., 1:] != IGNORED).sum())
