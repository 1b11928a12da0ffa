"""What carries a collective: the shared-memory link of one host, or torch.distributed."""

from typing import Any, Literal, Protocol

from torch import Tensor

Op = Literal["sum", "max"]


class Transport(Protocol):
    """The collectives of one group. Arguments are checked by the callers in `raw`."""

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

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The `x` of group rank `src`."""
        ...

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        ...

    def announce_failure(self, message: str) -> None:
        """Tell the ranks that wait, or will wait, for this one that it has failed."""
        ...
