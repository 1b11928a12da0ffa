"""What could differ between ranks inside the decoding loop is decided by group rank 0."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.hf.generation.messages import exchange

# Criteria of transformers that depend on nothing but the tokens and scores, equal on all ranks.
_SAME_EVERYWHERE = frozenset({"MaxLengthCriteria", "EosTokenCriteria", "ConfidenceCriteria"})


class RankZeroCriteria:
    """Several stopping criteria as one whose verdict is group rank 0's.

    Every rank evaluates them (a user's criterion may keep a state that the user reads later), but
    only group rank 0's clock, tokenizer and code decide.

    Comm:
        One `comm.exchange` of one flag per row, each step.
    """

    def __init__(self, criteria: Sequence[Callable[..., Any]], mesh: DeviceMesh) -> None:
        self.criteria = tuple(criteria)
        self.mesh = mesh
        for criterion in criteria:
            # transformers takes this attribute as the sign that finished rows are to be padded
            if hasattr(criterion, "eos_token_id"):
                self.eos_token_id = criterion.eos_token_id

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankZeroCriteria":
        return self

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows stop, `[batch]`, as group rank 0 sees it."""
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        for criterion in self.criteria:
            done = done | criterion(input_ids, scores, **kwargs)
        verdict = exchange("stopping criteria", done.tolist(), self.mesh)[0]
        return torch.tensor(verdict, dtype=torch.bool, device=input_ids.device)


def decide_at_rank_zero(criteria: Any, mesh: DeviceMesh) -> Any:
    """Replaces the criteria of a list that could differ between ranks by group rank 0's verdict.

    Args:
        criteria: transformers' `StoppingCriteriaList`.
        mesh: The 1-D mesh of the group.

    Returns:
        A list of the same type; the list itself where nothing in it could differ.
    """
    same = [c for c in criteria if _is_same_everywhere(c)]
    rest = [c for c in criteria if not _is_same_everywhere(c)]
    if not rest:
        return criteria
    return type(criteria)([*same, RankZeroCriteria(rest, mesh)])


def _is_same_everywhere(criterion: Any) -> bool:
    kind = type(criterion)
    return kind.__name__ in _SAME_EVERYWHERE and kind.__module__.startswith("transformers.")


class RankZeroScores:
    """The last logits processor where users brought their own: group rank 0's scores for all.

    Comm:
        One broadcast of `[batch, vocab]`, each step, after an exchange that carries a failure of
        the user's code to all ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankZeroScores":
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns group rank 0's `scores`, `[batch, vocab]`."""
        exchange("logits processors", tuple(scores.shape), self.mesh)
        return comm.broadcast(scores, self.mesh, src=0)


class SilentStreamer:
    """Stands for the streamer on every rank but group rank 0: takes tokens, shows nothing.

    Args:
        own: The rank's own streamer, if it has one. One that feeds an iterator gets its `end()`,
            so that whoever reads from it isn't left waiting; one that prints gets nothing.
    """

    def __init__(self, own: Any = None) -> None:
        self.own = own if own is not None and hasattr(own, "__iter__") else None

    def put(self, value: Tensor) -> None:
        """Drops the tokens."""

    def end(self) -> None:
        """Ends an iterator that somebody may be reading from."""
        if self.own is not None:
            self.own.end()
