"""Writing a checkpoint: one tensor at a time, under temporary names, all ranks or none.

The header of a safetensors file needs only names, dtypes and shapes, so the files are laid out
before any tensor is gathered; every tensor is then gathered, written to its place, and dropped.
The bytes are those that the safetensors library would write.
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from plait.errors import WeightsError
from plait.shapes.safetensors import DTYPE_BITS, encode_header
from plait.weights.loading import human_bytes
from plait.weights.mapped import NAMES
from plait.weights.outcome import agree, settle, together
from plait.weights.recipes import Recipe, Source
from plait.weights.store import WholeStore

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_ORDER = {name: place for place, name in enumerate(DTYPE_BITS)}


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote.

    Args:
        files: The files, the index last where there is one.
        total_bytes: Bytes of the tensors.
        seconds: Wall time.
    """

    files: tuple[Path, ...]
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        """One line for a log."""
        count = len([file for file in self.files if file.suffix != ".json"])
        files = "1 file" if count == 1 else f"{count} files"
        return f"wrote {human_bytes(self.total_bytes)} in {self.seconds:.1f} s to {files}"


@dataclass(frozen=True)
class _Item:
    """One tensor of the checkpoint: what it is, and where its bytes go."""

    name: str
    recipe: Recipe
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass
class _File:
    """One file that is being written under a temporary name."""

    path: Path
    items: list[_Item]
    offsets: dict[str, int] = field(default_factory=dict)
    handle: int = -1

    @property
    def partial(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")

    def open(self, metadata: Mapping[str, str]) -> None:
        if self.handle < 0:
            self.handle = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._write_header(metadata)

    def write(self, item: _Item, x: Tensor) -> None:
        raw = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        _write_all(self.handle, memoryview(raw.data), self.offsets[item.name])

    def _write_header(self, metadata: Mapping[str, str]) -> None:
        # The order of the safetensors library: wide dtypes first, so that all stay aligned.
        ordered = sorted(self.items, key=lambda item: (-_ORDER[NAMES[item.dtype]], item.name))
        described = [(item.name, NAMES[item.dtype], item.shape) for item in ordered]
        header = encode_header(described, metadata)
        _write_all(self.handle, memoryview(header), 0)
        position = len(header)
        for item in ordered:
            self.offsets[item.name] = position
            position += item.nbytes
        os.ftruncate(self.handle, position)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def save(
    store: WholeStore,
    recipes: Mapping[str, Recipe] | None,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SaveReport:
    """Writes the tensors of a module as an ordinary safetensors checkpoint.

    All ranks of the store's axis must call it. Its first rank writes; the others only take part in
    gathering, and nobody holds more than the tensors of one recipe. The files appear under their
    names when all are complete; after a failure the directory is as it was.

    Args:
        store: The tensors of the module.
        recipes: For each tensor of the checkpoint how it is made from those of the module; by
            default all of the module's, under its own names.
        directory: Where to; made if it is not there.
        max_shard_size: The largest file, in bytes or as in `"5GB"`; a larger tensor has a file of
            its own.
        variant: The middle part of names such as `model.fp16.safetensors`.
        metadata: Free-form strings for the headers; `{"format": "pt"}` by default.
        progress: Called with the bytes written so far and in all.

    Returns:
        What was written.

    Raises:
        WeightsError: The directory cannot be written, the disk is too small, or the ranks do not
            agree on what to save.
        RankError: Another rank failed, or did not take part.

    Comm:
        One all-gather of each split tensor; an exchange of a control message before each.
    """
    begin = time.perf_counter()
    directory, mesh = Path(directory), store.mesh
    if recipes is None:
        recipes = {name: Source(name) for name in store.keys()}  # noqa: SIM118
    asked = f"Save {len(recipes)} tensors to {directory}."
    if not recipes:
        raise WeightsError(asked, "there is nothing to save")
    items = [_Item(k, r, r.dtype(store), r.shape(store)) for k, r in recipes.items()]
    files = _sharded(items, directory, byte_count(max_shard_size), variant)
    total = sum(item.nbytes for item in items)
    agree(mesh, asked, repr([(item.name, item.dtype, item.shape) for item in items]))
    prepare = (lambda: _prepare(asked, directory, total)) if store.writes else list[Path]
    made = together(mesh, asked, prepare)
    try:
        done = 0
        for item in _written(store, items, asked, files, metadata or {"format": "pt"}):
            done += item.nbytes
            if progress is not None:
                progress(done, total)
        publish = (lambda: _publish(files, directory, variant, total)) if store.writes else _nothing
        index = together(mesh, asked, publish)
    except BaseException:
        _clean(files, made)
        raise
    written = tuple(file.path for file in files) + ((index,) if index else ())
    return SaveReport(written, total, time.perf_counter() - begin)


def byte_count(size: object) -> int:
    """Returns the bytes of a size such as `5_000`, `"5GB"` (decimal) or `"5GiB"` (binary).

    Raises:
        WeightsError: It is no size, or none above 0.
    """
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?I?)B?\s*", size.upper())
        if found and found[2] in _UNITS:
            count = int(float(found[1]) * _UNITS[found[2]])
    if count < 1:
        raise WeightsError(f"Save in files of {size!r}.", "that is no size", 'Write it as "5GB".')
    return count


def _written(
    store: WholeStore,
    items: list[_Item],
    asked: str,
    files: list[_File],
    metadata: Mapping[str, str],
) -> Iterator[_Item]:
    """Gathers and writes the items one by one; every rank learns at once where writing failed."""
    home = {item.name: file for file in files for item in file.items}
    left = Counter(name for item in items for name in item.recipe.names())
    failure: Exception | None = None
    for item in items:
        settle(store.mesh, asked, failure)
        for name in item.recipe.names():
            store.gather(name)
            left[name] -= 1
        if store.writes:
            try:
                home[item.name].open(metadata)
                home[item.name].write(item, _value(store, item))
            except Exception as error:
                failure = error
        for name in item.recipe.names():
            if not left[name]:
                store.drop(name)
        yield item
    settle(store.mesh, asked, failure)


def _nothing() -> None:
    """What the ranks that do not write do."""


def _value(store: WholeStore, item: _Item) -> Tensor:
    """The whole tensor on the CPU; no copy where the store holds it as it is."""
    if isinstance(item.recipe, Source):
        return store.whole(item.recipe.key)
    return item.recipe.read(store)


def _sharded(items: list[_Item], directory: Path, limit: int, variant: str | None) -> list[_File]:
    """The items in files of at most `limit` bytes, in order; a larger item alone."""
    groups: list[list[_Item]] = []
    current: list[_Item] = []
    size = 0
    for item in items:
        if item.nbytes > limit:
            groups.append([item])
            continue
        if current and size + item.nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(item)
        size += item.nbytes
    if current:
        groups.append(current)
    dot = f".{variant}" if variant else ""
    if len(groups) == 1:
        return [_File(directory / f"model{dot}.safetensors", groups[0])]
    count = len(groups)
    names = (f"model{dot}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
    return [_File(directory / name, group) for name, group in zip(names, groups, strict=True)]


def _prepare(asked: str, directory: Path, total: int) -> list[Path]:
    """Makes the directory; returns the directories that were not there before, inner first."""
    made = []
    parent = directory
    while not parent.exists():
        made.append(parent)
        parent = parent.parent
    if not parent.is_dir():
        raise WeightsError(asked, f"{parent} is a file, not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WeightsError(asked, f"{parent} cannot be written", "give another directory")
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < total:
        for path in made:
            path.rmdir()
        raise WeightsError(
            asked, f"it takes {human_bytes(total)}, the disk has {human_bytes(free)}"
        )
    return made


def _publish(files: list[_File], directory: Path, variant: str | None, total: int) -> Path | None:
    """Gives the complete files their names and removes what an earlier save left."""
    dot = f".{variant}" if variant else ""
    single = directory / f"model{dot}.safetensors"
    index = directory / f"model.safetensors.index{dot}.json"
    for file in files:
        file.close()
    for file in files:
        os.replace(file.partial, file.path)
    sharded = len(files) > 1
    if sharded:
        # The index before the old single file goes: readers prefer the single file, so at every
        # moment they find one checkpoint that is complete.
        _write_index(index, files, total)
        single.unlink(missing_ok=True)
    else:
        index.unlink(missing_ok=True)
    current = {file.path.name for file in files}
    pattern = re.compile(rf"model{re.escape(dot)}-\d{{5}}-of-\d{{5}}\.safetensors")
    for path in directory.iterdir():
        if pattern.fullmatch(path.name) and path.name not in current:
            path.unlink()
    return index if sharded else None


def _write_index(index: Path, files: list[_File], total: int) -> None:
    numel = sum(item.nbytes // item.dtype.itemsize for file in files for item in file.items)
    content = {
        "metadata": {"total_parameters": numel, "total_size": total},
        "weight_map": {item.name: file.path.name for file in files for item in file.items},
    }
    partial = index.with_name(f".{index.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
        os.replace(partial, index)
    finally:
        partial.unlink(missing_ok=True)


def _clean(files: list[_File], made: list[Path]) -> None:
    """Removes what an unfinished save wrote."""
    for file in files:
        file.close()
        file.partial.unlink(missing_ok=True)
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _write_all(handle: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + (1 << 30)], position + done)
