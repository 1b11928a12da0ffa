"""Reading regions of GGUF files: only the wanted rows are read and dequantized.

The elements of a row are quantized in blocks, so a row is the smallest piece that is read; a slice
of the last dimension is cut from dequantized rows, a few at a time.
"""

import mmap
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.errors import PlaitError, WeightsError
from plait.shapes.gguf import GgufHeader, read_gguf_header
from plait.shapes.safetensors import TensorEntry
from plait.weights.regions import Region, copy_region

if TYPE_CHECKING:
    from plait.shapes.files import CheckpointFiles
    from plait.weights.checkpoint import Checkpoint, Read

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FEW_PIECES = 8
_BLOCK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32


@cache
def _package() -> Any:
    try:
        import gguf  # noqa: F401
        from gguf import constants, quants
    except ImportError as error:
        raise PlaitError(
            "Read a GGUF file.", "the package gguf is not installed", "pip install 'plait[gguf]'"
        ) from error
    return constants, quants


def gguf_header(path: Any) -> GgufHeader:
    """Reads and checks the header of a GGUF file, with the block sizes of the gguf package."""
    constants, _ = _package()
    sizes = constants.GGML_QUANT_SIZES
    types = {int(kind): (kind.name, *sizes[kind]) for kind in sizes}
    return read_gguf_header(path, types)


def open_gguf(files: "CheckpointFiles") -> "Checkpoint":
    """Opens one or several GGUF files; quantized tensors appear as float32.

    Args:
        files: The files.

    Raises:
        WeightsError: A file is damaged, or a tensor is in two of them.
        PlaitError: The gguf package is not installed.
    """
    from plait.weights.checkpoint import Checkpoint

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int, Read]] = {}
    metadata: dict[str, object] = {}
    opened = []
    for path in files.files:
        header = gguf_header(path)
        metadata = header.metadata | metadata
        file = GgufFile(path)
        opened.append(file)
        for name, entry in header.tensors.items():
            if name in tensors:
                raise WeightsError(f"Open the checkpoint {files.origin}.", f"{name} is there twice")
            dtype = _PLAIN.get(entry.dtype, torch.float32)
            tensors[name] = (entry.shape, dtype, entry.nbytes, file.reader(entry))
    return Checkpoint(files, tensors, opened, metadata)


class GgufFile:
    """One open GGUF file.

    Args:
        path: The file; its header has been checked.
    """

    def __init__(self, path: Any) -> None:
        """Maps the file."""
        with open(path, "rb") as file:
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def reader(self, entry: TensorEntry) -> "Read":
        """Returns the function that copies a region of one tensor."""
        return lambda region, out: self.read_into(entry, region, out)

    def read_into(self, entry: TensorEntry, region: Region, out: Tensor) -> None:
        """Copies a region of the tensor at `entry` into `out`, dequantized, cast to its dtype.

        Args:
            entry: Where the tensor lies in this file.
            region: What is wanted.
            out: The destination, in any dtype, strides and device.
        """
        if out.numel() == 0:
            return
        if len(entry.shape) < 2:
            copy_region(self._rows(entry, 0, 1).view(entry.shape), region, out)
            return
        wanted = region[0]
        if wanted is not None and len(wanted) > _FEW_PIECES:
            # Rows in another order, of whole heads: what lies around them is wanted as well.
            low, high = min(a for a, _ in wanted), max(b for _, b in wanted)
            rows = self._rows(entry, low, high).view(high - low, *entry.shape[1:])
            moved = tuple((a - low, b - low) for a, b in wanted)
            copy_region(rows, (moved, *region[1:]), out)
            return
        inner = region[1:]
        position = 0
        for first, stop in _row_blocks(entry, region):
            rows = self._rows(entry, first, stop).view(stop - first, *entry.shape[1:])
            target = out.narrow(0, position, stop - first)
            copy_region(rows, (None, *inner), target)
            position += stop - first

    def close(self) -> None:
        """Drops the map."""
        self._map = None

    def _rows(self, entry: TensorEntry, first: int, stop: int) -> Tensor:
        """The slices `[first, stop)` of the first dimension, dequantized."""
        import numpy as np

        constants, quants = _package()
        assert self._map is not None, "the checkpoint is closed"
        count = entry.shape[0] if len(entry.shape) > 1 else 1
        each = entry.nbytes // count
        nbytes = each * (stop - first)
        raw = np.frombuffer(self._map, np.uint8, nbytes, entry.start + first * each).copy()
        if entry.dtype in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[entry.dtype])
        kind = constants.GGMLQuantizationType[entry.dtype]
        elements, block_bytes = constants.GGML_QUANT_SIZES[kind]
        rows = raw.reshape(-1, entry.shape[-1] // elements * block_bytes)
        try:
            values = quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise WeightsError(
                f"Read a {entry.dtype} tensor of {entry.file}.", str(error)
            ) from error
        return torch.from_numpy(values)


def _row_blocks(entry: TensorEntry, region: Region) -> Iterator[tuple[int, int]]:
    """The wanted ranges of the first dimension, cut so that a block fits the working memory."""
    inner = 1
    for size in entry.shape[1:]:
        inner *= size
    step = max(1, _BLOCK_ELEMENTS // inner)
    wanted = region[0]
    for a, b in ((0, entry.shape[0]),) if wanted is None else wanted:
        for first in range(a, b, step):
            yield first, min(first + step, b)
