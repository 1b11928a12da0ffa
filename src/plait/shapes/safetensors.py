"""The header of a safetensors file: parsed, checked in full, and written.

A file is an 8-byte little-endian header length, a JSON object `name → {dtype, shape,
data_offsets}`, and the tensors' bytes one after another without holes.

Source: the format description of the safetensors project (version 0.8).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format; a longer header is a damaged length field."""

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element takes, for each dtype name of the format."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Args:
        file: The file that holds it.
        dtype: Its dtype, by the name that the file format uses.
        shape: Its shape.
        start: First byte of its data, counted from the start of the file.
        stop: One past the last byte of its data.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.stop - self.start


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads and checks the header of one safetensors file.

    Args:
        path: The file.

    Returns:
        The tensors in the order of their bytes, and the free-form metadata.

    Raises:
        WeightsError: The file is missing, truncated, or its header is damaged: not JSON, a name
            twice, an unknown dtype, sizes that do not fit the byte ranges, ranges that overlap,
            leave holes or leave the file.
    """
    path = Path(path)
    asked = f"Read the header of {path}."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                _refuse(asked, f"the file has {size} bytes; a safetensors file has at least 8")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                _refuse(
                    asked,
                    f"its first 8 bytes give a header of {length} bytes; the format allows "
                    f"{MAX_HEADER_BYTES}, so this is no safetensors file or it is damaged",
                )
            if 8 + length > size:
                _refuse(
                    asked, f"truncated: the header ends at byte {8 + length}, the file at {size}"
                )
            raw = file.read(length)
    except OSError as error:
        raise WeightsError(asked, f"{error.strerror}: {path}") from error
    parsed = _parse_json(asked, raw)
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        _refuse(asked, "corrupt header: __metadata__ is not an object")
    problems: list[str] = []
    entries = {}
    for name, value in parsed.items():
        entry = _entry(path, name, value, 8 + length, problems)
        if entry is not None:
            entries[name] = entry
    if not problems:
        problems = _range_problems(entries, 8 + length, size)
    if problems:
        raise WeightsError(asked, _first(problems), "Copy or download the file again.")
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    return entries, {str(key): str(value) for key, value in metadata.items()}


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the length field and header of a file that holds `tensors` in this order.

    Args:
        tensors: Name, dtype name and shape of each tensor.
        metadata: Free-form strings.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        offsets = [offset, offset + nbytes]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        offset += nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # so that the tensors' bytes are aligned, as the format asks
    return len(raw).to_bytes(8, "little") + raw


def _parse_json(asked: str, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{twice!r} appears twice")
        return result

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WeightsError(asked, f"corrupt header: {error}") from error
    if not isinstance(parsed, dict):
        _refuse(asked, "corrupt header: it is not a JSON object")
    return parsed


def _entry(
    path: Path, name: str, value: Any, data_start: int, problems: list[str]
) -> TensorEntry | None:
    """The checked entry of one tensor, or None and a line in `problems`."""
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError):
        problems.append(f"corrupt header: {name!r} lacks dtype, shape or data_offsets")
        return None
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        problems.append(f"corrupt header: {name!r} has shape {shape} and offsets {start}, {stop}")
        return None
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        problems.append(f"{name!r} has dtype {dtype!r}, which this format does not know")
        return None
    wanted = math.prod(shape) * bits
    if wanted != (stop - start) * 8:
        problems.append(
            f"corrupt header: {name!r} is {dtype} {tuple(shape)}, which takes {wanted // 8} bytes, "
            f"but its range [{start}, {stop}) has {stop - start}"
        )
        return None
    return TensorEntry(path, dtype, tuple(shape), data_start + start, data_start + stop)


def _range_problems(entries: Mapping[str, TensorEntry], start: int, size: int) -> list[str]:
    """What is wrong with the byte ranges of a whole file: overlaps, holes, truncation."""
    problems = []
    position, last = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            kind = "overlaps" if entry.start < position else "leaves a hole after"
            problems.append(
                f"corrupt header: {name!r} {kind} {last}: its bytes begin at {entry.start}, "
                f"expected {position}"
            )
        position, last = max(position, entry.stop), repr(name)
    if position > size:
        problems.append(f"truncated: the tensors end at byte {position}, the file at byte {size}")
    elif position < size:
        problems.append(
            f"corrupt: the tensors end at byte {position}, but the file goes on to byte {size}"
        )
    return problems


def _first(problems: list[str], count: int = 8) -> list[str]:
    """`problems`, cut after `count`."""
    more = [f"and {len(problems) - count} more"] if len(problems) > count else []
    return problems[:count] + more


def _refuse(asked: str, problem: str) -> NoReturn:
    raise WeightsError(asked, problem, "Copy or download the file again.")
