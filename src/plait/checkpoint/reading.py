"""The tensors of a checkpoint as a store that recipes read from: whole ones, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from plait.checkpoint.held import Held
from plait.checkpoint.manifest import MODEL, Manifest
from plait.checkpoint.planners import ChunkReader
from plait.state import Piece
from plait.weights.regions import Region, copy_region


class CheckpointStore:
    """The model's tensors in a checkpoint; what `plait.weights.save` writes from.

    Args:
        folder: The checkpoint.
        manifest: What it holds.
        names: Names of a model → those stored.
        dtype_of: From a name and the stored dtype to the dtype that is given.
    """

    mesh = None
    writes = True

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        names: Mapping[str, str],
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
    ) -> None:
        self._reader = ChunkReader(folder, manifest)
        self._stored = {name: manifest.tensors[MODEL + there] for name, there in names.items()}
        self._names = dict(names)
        self._dtype_of = dtype_of
        self._whole: dict[str, torch.Tensor] = {}

    def keys(self) -> Sequence[str]:
        """The names of all tensors."""
        return list(self._stored)

    def info(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape of a tensor, and the dtype it is given in."""
        stored = self._stored[key]
        return stored.shape, self._dtype_of(key, stored.dtype)

    def gather(self, key: str) -> None:
        """Reads a tensor."""
        if key in self._whole:
            return
        shape, dtype = self.info(key)
        x = torch.empty(shape, dtype=dtype)
        zeros = (0,) * len(shape)
        pieces = (Piece(zeros, shape, zeros),) if x.numel() else ()
        self._reader.fill([(MODEL + self._names[key], Held(key, shape, x, pieces))])
        self._whole[key] = x

    def whole(self, key: str) -> torch.Tensor:
        """A tensor that has been read."""
        return self._whole[key]

    def drop(self, key: str) -> None:
        """Forgets a tensor that has been read."""
        del self._whole[key]

    def read_into(self, key: str, region: Region, out: torch.Tensor) -> None:
        """Copies a region of a tensor that has been read into `out`."""
        copy_region(self._whole[key], region, out)
