"""A vocabulary that is split over the ranks of an axis, slice by slice in rank order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import all_reduce, copy_to, gather_from, split_to, sum_from
from plait.comm.transport import Op


@dataclass(frozen=True)
class Vocabulary:
    """Which entries of a vocabulary each rank holds.

    Attributes:
        sizes: The number of entries on each rank; they need not be equal, and may be 0.
        mesh: The axis; None: there is one slice, the whole.
    """

    sizes: tuple[int, ...]
    mesh: DeviceMesh | None = None

    @classmethod
    def over(cls, sizes: Sequence[int], mesh: DeviceMesh | None) -> "Vocabulary":
        """A vocabulary over an axis, which may have one rank only."""
        return cls(tuple(sizes), mesh if len(sizes) > 1 else None)

    @property
    def whole(self) -> int:
        """The number of entries."""
        return sum(self.sizes)

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def start(self) -> int:
        """The first entry that this rank holds."""
        return sum(self.sizes[: self.rank])

    @property
    def local(self) -> int:
        """The number of entries that this rank holds."""
        return self.sizes[self.rank]

    def reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """The sum or maximum of the ranks' terms, without a gradient."""
        return x if self.mesh is None or not x.numel() else all_reduce(x, self.mesh, op)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' terms: one value, whose gradient every term gets."""
        return x if self.mesh is None or not x.numel() else sum_from(x, self.mesh)

    def copy(self, x: Tensor) -> Tensor:
        """A value that all ranks hold, for a computation on each rank's slice."""
        return x if self.mesh is None or not x.numel() else copy_to(x, self.mesh)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The whole, of the ranks' slices."""
        return x if self.mesh is None else gather_from(x, self.mesh, dim, self.sizes)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's slice of a whole that all ranks hold."""
        return x if self.mesh is None else split_to(x, self.mesh, dim, self.sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
        return self  # nothing in it changes, and a mesh cannot be copied
