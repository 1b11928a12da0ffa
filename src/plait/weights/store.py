"""What recipes read from: named tensors of which any region can be copied out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.weights.regions import Region

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class TensorStore(Protocol):
    """Named tensors: a checkpoint on disk, or the parameters of a model that is being saved."""

    def keys(self) -> Sequence[str]:
        """The names of all tensors."""
        ...

    def info(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of one tensor."""
        ...

    def read_into(self, key: str, region: Region, out: Tensor) -> None:
        """Copies a region of one tensor into `out`, cast to its dtype."""
        ...


@runtime_checkable
class Viewable(TensorStore, Protocol):
    """A store that can give some regions without reading them."""

    def view(self, key: str, region: Region) -> Tensor | None:
        """A region of one tensor as it lies in the store, or None where it must be copied."""
        ...


class WholeStore(TensorStore, Protocol):
    """Tensors that are made whole one at a time on the rank that writes."""

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The ranks that save together; None for one process."""
        ...

    @property
    def writes(self) -> bool:
        """Whether this is the rank that receives the whole tensors."""
        ...

    def gather(self, key: str) -> None:
        """Makes a tensor whole; all ranks must call it."""
        ...

    def whole(self, key: str) -> Tensor:
        """A tensor that was made whole, on the CPU."""
        ...

    def drop(self, key: str) -> None:
        """Forgets it."""
        ...
