"""The wholes that were gathered of slices, and what is done to them in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import PlaitError
from plait.loss.vocabulary import Vocabulary


def version_of(x: Tensor) -> int:
    """How often a tensor's memory was changed; of inference tensors nobody counts."""
    return 0 if x.is_inference() else x._version


@dataclass
class _Entry:
    local: Tensor
    local_version: int
    whole: Tensor
    whole_version: int
    vocabulary: Vocabulary
    dim: int

    def is_current(self) -> bool:
        return version_of(self.local) == self.local_version

    def is_changed(self) -> bool:
        return version_of(self.whole) != self.whole_version


class Gathered:
    """The wholes of slices that share memory.

    Code that changes a whole, or a view of it, in place (`logits[..., 7] = -inf`) means the logits:
    the change is brought back to the slice before it is used again.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def whole(self, local: Tensor, vocabulary: Vocabulary, dim: int) -> Tensor:
        """The whole of a slice.

        Comm: one all-gather, where it was not gathered before.
        """
        if vocabulary.mesh is None:
            return local
        records = local.requires_grad and torch.is_grad_enabled()
        for entry in self._entries:
            same = entry.local is local and entry.is_current()
            if same and entry.whole.requires_grad == records:
                return entry.whole
        whole = vocabulary.gather(local, dim)
        self._entries = [x for x in self._entries if x.is_current()]
        self._entries.append(
            _Entry(local, version_of(local), whole, version_of(whole), vocabulary, dim)
        )
        return whole

    def settle(self, of: Tensor | None = None) -> None:
        """Bring what was changed in wholes back to the slices.

        Args:
            of: A whole that was changed and does not know it: an inference tensor.

        Raises:
            PlaitError: Both a whole and its slice were changed.

        Comm: forward nothing; backward one all-gather for each change.
        """
        for entry in [x for x in self._entries if x.is_changed() or x.whole is of]:
            if not entry.is_current():
                raise PlaitError(
                    "Split logits that were changed in place:",
                    "once in a part that needs the whole vocabulary, and once elsewhere",
                    "output_logits=True in the call of the model: whole logits",
                )
            entry.local.copy_(entry.vocabulary.split(entry.whole, entry.dim))
            entry.local_version = version_of(entry.local)
            entry.whole_version = version_of(entry.whole)
