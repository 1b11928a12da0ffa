"""One forward over sequences that ranks share: who holds which tokens, and what they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait import comm
from plait.attention.spans import Tokens, places_of
from plait.errors import PlaitError
from plait.mesh import SequenceAxes

IGNORED = -100
_POSITIONS, _MASK, _LABELS = 1, 2, 4  # what a rank was given


@dataclass
class SharedSequences:
    """What all ranks know of the sequences of one forward.

    Attributes:
        axes: The ranks that share them.
        tokens: For each of these ranks, in their order, which tokens it holds.
        batch: Number of sequences.
        positions: `[batch, seq]`, whole, in the order of the sequence; None: nobody was given any.
        valid: `[batch, seq]`, False where a token is padding; None: nobody was given a mask.
        labels: `[batch, seq]`, whole; None: nobody was given any.
        routes: What the layers of this forward have found out about masks, to be found again.
    """

    axes: SequenceAxes
    tokens: tuple[Tokens, ...]
    batch: int
    positions: Tensor | None = None
    valid: Tensor | None = None
    labels: Tensor | None = None
    routes: dict[Any, Any] = field(default_factory=dict)

    @property
    def mine(self) -> Tokens:
        """The tokens of this rank."""
        return self.tokens[self.axes.place]

    @property
    def length(self) -> int:
        """Length of the whole sequences."""
        return sum(len(held) for held in self.tokens)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a `[batch, seq]` tensor."""
        return whole.index_select(1, self.mine.index().to(whole.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedSequences":
        return self


_CURRENT: ContextVar[SharedSequences | None] = ContextVar("plait_shared_sequences", default=None)


def current() -> SharedSequences | None:
    """The sequences of the forward that runs; None where none are shared."""
    return _CURRENT.get()


@contextmanager
def shared(found: SharedSequences | None) -> Iterator[None]:
    """Inside, attention is over the tokens of all ranks that share these sequences."""
    token = _CURRENT.set(found)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def meet(
    axes: SequenceAxes,
    shape: tuple[int, int],
    device: torch.device,
    *,
    ids: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
) -> SharedSequences:
    """Tell the ranks that share the sequences of a forward what each of them holds.

    Args:
        axes: The ranks.
        shape: `(batch, seq_local)` of this rank.
        device: Where its tokens are.
        ids: `[batch, seq_local]`, the tokens, if they are numbers.
        positions: `[batch or 1, seq_local]`, if it was given any.
        mask: `[batch, seq_local]`, 0 where a token is padding, if it was given one.
        labels: `[batch, seq_local]`, if they have to be shifted.

    Returns:
        What all of them know now, the same on all.

    Raises:
        PlaitError: The ranks were given different things, or their lengths are not those of
            [`places_of`][plait.attention.places_of]. All ranks raise it.
        RankError: The ranks hold different numbers of sequences, or one of them does not come.

    Comm: one all-gather of five integers for each token.
    """
    batch, length = shape
    told = torch.zeros(batch, length, 5, dtype=torch.int64, device=device)
    given = 0
    for place, (flag, x) in enumerate(((_POSITIONS, positions), (_MASK, mask), (_LABELS, labels))):
        if x is not None:
            given |= flag
            told[..., place] = x
    told[..., 3] = given
    if ids is not None:
        told[..., 4] = ids
    whole, lengths = comm.all_gather_sized(told, axes.both, 1)
    tokens = places_of(sum(lengths), axes.cp_size, axes.sp_size)
    flags = [int(x[0, 0, 3]) if x.numel() else None for x in whole.split(list(lengths), 1)]
    _check(axes, lengths, tokens, flags)
    _refuse_copies(whole[..., [0, 4]].split(list(lengths), 1))
    order = torch.cat([held.index() for held in tokens]).to(device)
    in_order = torch.empty_like(whole)
    in_order[:, order] = whole
    given = next((flag for flag in flags if flag is not None), given)
    return SharedSequences(
        axes,
        tokens,
        batch,
        in_order[..., 0] if given & _POSITIONS else None,
        in_order[..., 1] != 0 if given & _MASK else None,
        in_order[..., 2] if given & _LABELS else None,
    )


def _check(
    axes: SequenceAxes,
    lengths: Sequence[int],
    tokens: Sequence[Tokens],
    flags: Sequence[int | None],
) -> None:
    """Refuse what the ranks were given, on all of them alike."""
    asked = f"A forward over sequences that {len(tokens)} ranks share:"
    wanted = [len(held) for held in tokens]
    if list(lengths) != wanted:
        raise PlaitError(
            asked,
            f"they were given {', '.join(map(str, lengths))} tokens; of {sum(lengths)} they hold "
            f"{', '.join(map(str, wanted))} (cp {axes.cp_size} × sp {axes.sp_size})",
            (
                "plait.SequenceParallelLoader(loader, accelerator) splits batches",
                "plait.split_batch(batch, model) splits one",
                "plait.gathered(model): forwards over whole sequences, each rank by itself",
            ),
        )
    known = {flag for flag in flags if flag is not None}
    if len(known) > 1:
        names = {_POSITIONS: "position_ids", _MASK: "attention_mask", _LABELS: "labels"}
        rows = [
            f"place {place}: {', '.join(n for f, n in names.items() if flag & f) or 'none of them'}"
            for place, flag in enumerate(flags)
            if flag is not None
        ]
        raise PlaitError(asked, ["they were given different arguments", *rows])


def _refuse_copies(parts: Sequence[Tensor]) -> None:
    """Refuse parts with the same tokens at the same positions: whole batches that nobody split."""
    first = parts[0]
    varies = first.shape[1] > 1 and bool(first[..., 1].diff().any())
    if varies and all(torch.equal(x, first) for x in parts):
        raise PlaitError(
            f"A forward over sequences that {len(parts)} ranks share:",
            "all of them were given the same tokens: the batch was not split",
            (
                "plait.SequenceParallelLoader(loader, accelerator) splits batches",
                "plait.split_batch(batch, model) splits one",
                "plait.gathered(model): forwards over whole sequences, each rank by itself",
            ),
        )


def documents_of(positions: Tensor) -> Tensor | None:
    """Which document each token is of, by positions that begin anew.

    Args:
        positions: `[batch, seq]`.

    Returns:
        `[batch, seq]`, counted from 0 in each sequence; None where each is one document.
    """
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
