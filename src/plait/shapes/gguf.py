"""The header of a GGUF file: metadata and where each tensor lies, read and checked.

Integers are little-endian. Magic and version, the numbers of tensors and of metadata entries, the
entries, the tensor table (name, dimensions with the fastest first, type, offset), then the tensors'
bytes from the next multiple of the alignment on.

Source: the GGUF format description of the ggml project, versions 2 and 3.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import WeightsError
from plait.shapes.safetensors import TensorEntry

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 24  # tensors, entries, or items of an array: more is a damaged count


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Args:
        metadata: Its entries; an array of strings is given by its length alone.
        tensors: Where each tensor lies; the dtype is the name of its ggml type, the shape is in
            the order of torch (slowest dimension first).
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_gguf_header(
    path: str | os.PathLike[str], types: Mapping[int, tuple[str, int, int]]
) -> GgufHeader:
    """Reads and checks the header of a GGUF file.

    Args:
        path: The file.
        types: For each ggml type number its name, elements a block, and bytes a block.

    Raises:
        WeightsError: The file is missing, truncated, no GGUF file, or damaged.
    """
    path = Path(path)
    asked = f"Read the header of {path}."
    try:
        size = path.stat().st_size
        if size < 24:
            _refuse(asked, f"the file has {size} bytes; a GGUF file has at least 24")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _parse(asked, path, data, types)
    except OSError as error:
        raise WeightsError(asked, f"{error.strerror}: {path}") from error
    except struct.error as error:
        raise WeightsError(
            asked,
            f"truncated or corrupt: its header runs past the end of the file at byte {size}",
            "Copy or download the file again.",
        ) from error


class _Cursor:
    """A position in the header that moves as values are read."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def take(self, code: str) -> Any:
        values = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return values[0] if len(values) == 1 else values

    def count(self) -> int:
        value: int = self.take("Q")
        if value > _MAX_COUNT:
            raise struct.error(f"a count of {value}")
        return value

    def skip(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position > len(self.data):
            raise struct.error("past the end")

    def string(self) -> str:
        length = self.count()
        start = self.position
        self.skip(length)
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise struct.error(f"a value of type {kind}")
        item, count = self.take("I"), self.count()
        if item in _SCALARS:
            values = self.take(f"{count}{_SCALARS[item]}")
            return list(values) if isinstance(values, tuple) else [values]
        if item != _STRING:
            raise struct.error(f"an array of type {item}")
        for _ in range(count):
            self.skip(self.count())
        return count


def _parse(
    asked: str, path: Path, data: mmap.mmap, types: Mapping[int, tuple[str, int, int]]
) -> GgufHeader:
    at = _Cursor(data, 8)
    magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
    if magic != b"GGUF":
        _refuse(asked, f"it begins with {magic!r}, not with b'GGUF'")
    if version not in (2, 3):
        _refuse(asked, f"it is of version {version}; versions 2 and 3 can be read")
    num_tensors, num_entries = at.count(), at.count()
    metadata = {}
    for _ in range(num_entries):
        key = at.string()
        metadata[key] = at.value(at.take("I"))
    table = []
    for _ in range(num_tensors):
        name, num_dims = at.string(), at.take("I")
        if num_dims > 8:
            _refuse(asked, f"corrupt header: {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([at.take("Q") for _ in range(num_dims)]))
        table.append((name, shape, at.take("I"), at.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        _refuse(asked, f"corrupt header: an alignment of {alignment}")
    start = -(-at.position // alignment) * alignment
    return GgufHeader(metadata, _entries(asked, path, table, types, start, len(data)))


def _entries(
    asked: str,
    path: Path,
    table: list[tuple[str, tuple[int, ...], int, int]],
    types: Mapping[int, tuple[str, int, int]],
    start: int,
    size: int,
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    problems = []
    for name, shape, number, offset in table:
        if number not in types:
            problems.append(f"{name!r} has ggml type {number}, which the gguf package cannot read")
            continue
        kind, elements, nbytes = types[number]
        row = shape[-1] if shape else 1
        if row % elements:
            problems.append(
                f"{name!r} is {kind} with rows of {row}, not a multiple of its blocks of {elements}"
            )
            continue
        if name in entries:
            problems.append(f"{name!r} appears twice")
        stop = start + offset + math.prod(shape) // elements * nbytes
        entries[name] = TensorEntry(path, kind, shape, start + offset, stop)
    end = max((entry.stop for entry in entries.values()), default=0)
    if end > size:
        problems.append(f"truncated: the tensors end at byte {end}, the file at byte {size}")
    ordered = sorted(entries.items(), key=lambda item: item[1].start)
    for (name, entry), (other, after) in pairwise(ordered):
        if after.start < entry.stop:
            problems.append(f"corrupt header: {other!r} overlaps {name!r}")
    if problems:
        raise WeightsError(asked, problems[:8], "Copy or download the file again.")
    return entries


def _refuse(asked: str, problem: str) -> NoReturn:
    raise WeightsError(asked, problem, "Copy or download the file again.")
