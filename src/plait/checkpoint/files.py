"""Files with their sizes and checksums, which are computed while they are written."""

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from plait.errors import CheckpointError

_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a file must be.

    Attributes:
        nbytes: Its size.
        sha256: Of its content.
    """

    nbytes: int
    sha256: str


class _Hashing(io.RawIOBase):
    """A file that is written from beginning to end, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "wb", buffering=0)
        self.hash = hashlib.sha256()
        self.position = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hash.update(view)
        done = 0
        while done < len(view):
            done += self.file.write(view[done : done + (1 << 30)])
        self.position += len(view)
        return len(view)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass  # nothing is held back

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()


class HashingFiles(FileSystem):
    """The file system that torch's checkpoint writer writes to.

    Attributes:
        records: The files written, by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file to be written, or to be read as usual."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _Hashing(Path(path))
        try:
            yield cast(io.IOBase, file)
        finally:
            file.close()
        self.records[file.path.name] = FileRecord(file.position, file.hash.hexdigest())


def write(path: Path, content: bytes) -> FileRecord:
    """Writes a small file and brings it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def record(path: Path) -> FileRecord:
    """Reads a file for its size and checksum."""
    hash, nbytes = hashlib.sha256(), 0
    buffer = bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hash.update(memoryview(buffer)[:count])
            nbytes += count
    return FileRecord(nbytes, hash.hexdigest())


def packed(asked: str, **values: Any) -> bytes:
    """Values as a file that is read without running anything that it says.

    Args:
        asked: For the message.
        **values: Tensors, numbers, texts, and lists, tuples, sets and dicts of those.

    Raises:
        CheckpointError: Some value is of another type; it is named.
    """
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
        unpacked(buffer.getvalue())
    except Exception:
        problems = [problem for name, x in values.items() for problem in _unsafe(name, x)]
        raise CheckpointError(
            asked,
            problems or "something in it cannot be stored",
            "store tensors, numbers, texts, and lists, tuples and dicts of those",
        ) from None
    return buffer.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """The inverse of `packed`."""
    values: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return values


def _unsafe(name: str, x: Any) -> list[str]:
    """The innermost values that cannot be stored, with their places."""
    if isinstance(x, dict):
        inner = [p for key, value in x.items() for p in _unsafe(f"{name}[{key!r}]", value)]
    elif isinstance(x, list | tuple):
        inner = [p for i, value in enumerate(x) for p in _unsafe(f"{name}[{i}]", value)]
    else:
        inner = []
    if inner:
        return inner
    buffer = io.BytesIO()
    try:
        torch.save({"x": x}, buffer)
        unpacked(buffer.getvalue())
    except Exception:
        return [f"{name} is a {type(x).__module__}.{type(x).__qualname__}, which is not stored"]
    return []
