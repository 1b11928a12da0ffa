"""An open checkpoint: its tensors by name, of which any slice can be read."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.errors import WeightsError
from plait.plan.intervals import Pieces
from plait.shapes.files import CheckpointFiles, PathLike, find_files, index_problems, layout_of
from plait.shapes.safetensors import TensorEntry
from plait.weights.mapped import DTYPES, MappedFile
from plait.weights.regions import Region, along, copy_region, shape_in


@runtime_checkable
class TensorFile(Protocol):
    """One open file of any format."""

    def close(self) -> None:
        """Releases the file."""
        ...


Read = Callable[[Region, Tensor], None]


View = Callable[[Region], Tensor | None]


class Checkpoint:
    """Named tensors in one or more open files.

    Made by [`open_checkpoint`][plait.weights.open_checkpoint]; a context manager that closes the
    files at its end.

    Args:
        files: The files behind it.
        tensors: For each tensor its shape, its dtype once read, the bytes that its elements take
            in the file in all, and the function that copies a region of it.
        opened: The files to close at the end.
        metadata: Free-form strings found in the headers.
        views: For each tensor of which regions can be views of the file, the function that makes
            one.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int, Read]],
        opened: Sequence[TensorFile],
        metadata: dict[str, object] | None = None,
        views: dict[str, View] | None = None,
    ) -> None:
        """Takes over the open files."""
        self.files = files
        self.metadata = metadata or {}
        self.bytes_read = 0
        self._tensors = tensors
        self._views = views or {}
        self._opened = list(opened)

    def keys(self) -> Sequence[str]:
        """Returns the names of all tensors."""
        return list(self._tensors)

    def __contains__(self, key: object) -> bool:
        """Whether a tensor of this name is there."""
        return key in self._tensors

    def info(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and the dtype of one tensor (of a quantized one: once dequantized).

        Raises:
            WeightsError: There is no tensor of this name.
        """
        return self._found(key)[:2]

    def nbytes(self, key: str) -> int:
        """Returns the bytes that a tensor takes in its file."""
        return self._found(key)[2]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry[2] for entry in self._tensors.values())

    def read(
        self,
        key: str,
        dim: int | None = None,
        pieces: Pieces = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Reads the pieces of one tensor along one dimension, and only their bytes.

        Args:
            key: The tensor.
            dim: The dimension that is cut, or None for the whole tensor.
            pieces: The wanted index ranges along `dim`, in the order of the result.
            dtype: The dtype of the result; the file's own by default.
            device: Where the result lies.

        Returns:
            A new contiguous tensor, of the tensor's shape with `dim` reduced to the pieces.

        Raises:
            WeightsError: There is no such tensor, or its file ends early.
        """
        shape, own = self.info(key)
        region = along(len(shape), dim, pieces)
        out = torch.empty(shape_in(shape, region), dtype=dtype or own, device=device)
        self.read_into(key, region, out)
        return out

    def read_into(self, key: str, region: Region, out: Tensor) -> None:
        """Copies a region of one tensor into `out`, cast to its dtype and device."""
        shape, _, nbytes, read = self._found(key)
        total = 1
        for size in shape:
            total *= size
        with torch.no_grad():
            read(region, out)
        self.bytes_read += nbytes * out.numel() // max(total, 1)

    def view(self, key: str, region: Region) -> Tensor | None:
        """Returns a region of one tensor as a view of its file, or None where it must be read."""
        make = self._views.get(key)
        x = None if make is None else make(region)
        if x is not None:
            self.bytes_read += x.numel() * x.element_size()
        return x

    def close(self) -> None:
        """Closes the files."""
        for file in self._opened:
            file.close()
        self._opened.clear()

    def __enter__(self) -> "Checkpoint":
        """Returns itself; the files are closed at the end of the `with` block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the files."""
        self.close()

    def _found(self, key: str) -> tuple[tuple[int, ...], torch.dtype, int, Read]:
        entry = self._tensors.get(key)
        if entry is None:
            near = get_close_matches(key, list(self._tensors), 3)
            raise WeightsError(
                f"Read the tensor {key} of {self.files.origin}.",
                f"there is none of this name among {len(self._tensors)}"
                + (f"; near: {', '.join(near)}" if near else ""),
            )
        return entry


def open_checkpoint(
    path: PathLike | Sequence[PathLike], variant: str | None = None, mapped: bool = True
) -> Checkpoint:
    """Opens a checkpoint; every header is read and checked, no tensor is.

    Args:
        path: A directory, a weight file (`.safetensors`, `.gguf`, `.bin`), an index, or several
            weight files.
        variant: The middle part of names such as `model.fp16.safetensors`.
        mapped: Let CPU parameters that lie in one stretch of a safetensors file, in the right
            dtype, be views of it: they are read when they are first used and shared with other
            processes, and the file must stay as it is. False reads everything into memory.

    Raises:
        WeightsError: A file is missing, truncated or damaged, the index names what is not there,
            or two files hold the same tensor. The message names file and tensor.
    """
    files = find_files(path, variant)
    if files.kind == "gguf":
        from plait.weights.gguf import open_gguf

        return open_gguf(files)
    return _open_bin(files) if files.kind == "bin" else _open_safetensors(files, mapped)


def _open_safetensors(files: CheckpointFiles, mapped: bool) -> Checkpoint:
    entries = layout_of(files)
    unknown = [f"{key} is {e.dtype}" for key, e in entries.items() if e.dtype not in DTYPES]
    if unknown:
        raise WeightsError(
            f"Open the checkpoint {files.origin}.",
            [f"{line}, a dtype that torch cannot hold" for line in unknown[:8]],
        )
    opened = {path: MappedFile(path) for path in files.files}

    def reader(entry: TensorEntry) -> Read:
        return lambda region, out: opened[entry.file].read_into(entry, region, out)

    tensors = {
        key: (entry.shape, DTYPES[entry.dtype], entry.nbytes, reader(entry))
        for key, entry in entries.items()
    }

    def viewer(entry: TensorEntry) -> View:
        return lambda region: opened[entry.file].view(entry, region)

    views = {key: viewer(entry) for key, entry in entries.items()} if mapped else {}
    return Checkpoint(files, tensors, list(opened.values()), views=views)


def _open_bin(files: CheckpointFiles) -> Checkpoint:
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int, Read]] = {}
    found: dict[str, Path] = {}
    problems = []
    for path in files.files:
        for key, x in _load_bin(path).items():
            if key in found:
                problems.append(f"{key} is in {found[key].name} and in {path.name}")
            found[key] = path
            tensors[key] = (tuple(x.shape), x.dtype, x.numel() * x.element_size(), _copy_of(x))
    problems += index_problems(files, found)
    if problems:
        raise WeightsError(f"Open the checkpoint {files.origin}.", problems[:8])
    return Checkpoint(files, tensors, ())


def _load_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of one file that `torch.save` wrote, mapped from disk where it allows it."""
    asked = f"Open {path}."
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size = path.stat().st_size if path.is_file() else 0
        raise WeightsError(
            asked, f"torch.load cannot read its {size} bytes with weights_only=True: {error}"
        ) from error
    if not isinstance(state, dict):
        raise WeightsError(asked, f"it holds a {type(state).__name__}, not a dict of tensors")
    state = state.get("state_dict", state)
    return {str(key): x for key, x in state.items() if isinstance(x, Tensor)}


def _copy_of(x: Tensor) -> Read:
    return lambda region, out: copy_region(x, region, out)
