"""What carries a collective: the shared-memory link of one host, or torch.distributed."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Op = Literal["sum", "max"]


class Transport(Protocol):
    """The collectives of one group. Arguments are checked by the callers in `raw`."""

    @property
    def spent(self) -> bool:
        """Whether a failure has been reported and a new transport is to be made."""
        ...

    def all_reduce(self, x: Tensor, op: Op, out: Tensor | None) -> Tensor:
        """The reduction of every rank's `x`; written to `out` (which may be `x`) if given."""
        ...

    def all_gather(
        self, x: Tensor, dim: int, sizes: tuple[int, ...] | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Every rank's `x`, in rank order along `dim`, and the extent of each."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This rank's piece along `dim` of the sum of every rank's `x`."""
        ...

    def all_to_all(self, pieces: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
        """What every rank sends this one, flat: piece `r` of each goes to group rank `r`."""
        ...

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The `x` of group rank `src`."""
        ...

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        ...

    def announce_failure(self, message: str) -> bool:
        """Tell the ranks that wait, or will wait, for this one that it has failed, if it can."""
        ...

    def raise_if_final(self) -> None:
        """Raise the failure that has spent this transport if no new one can be made."""
        ...

    def refuse(self, message: str) -> None:
        """Take part in the peers' next collective only to say that this rank cannot."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """How long to wait for a rank that does not come, if this transport can choose."""
        ...

    def close(self) -> None:
        """Let go of memory that other processes share."""
        ...
