"""Which files make up a checkpoint, and where each tensor of a safetensors checkpoint lies."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from plait.errors import WeightsError
from plait.shapes.safetensors import TensorEntry, read_header

Kind = Literal["safetensors", "bin", "gguf"]
_SUFFIXES: dict[str, Kind] = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".bin": "bin",
    ".pt": "bin",
    ".pth": "bin",
}
PathLike = str | os.PathLike[str]
_INDEX = re.compile(r"\.index(\.[^.]+)?\.json$")  # with the variant, if there is one


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, found but not opened.

    Args:
        kind: The file format, the same for all files.
        files: The weight files.
        index: For each tensor the file that the index names, or None where there is no index.
        origin: What was asked for, for error messages.
    """

    kind: Kind
    files: tuple[Path, ...]
    index: dict[str, Path] | None
    origin: str


def find_files(path: PathLike | Sequence[PathLike], variant: str | None = None) -> CheckpointFiles:
    """Finds the weight files behind a path.

    Args:
        path: A directory (`model.safetensors`, its index, `pytorch_model.bin`, its index, or one
            GGUF file, in this order), one weight file, one index, or several weight files.
        variant: The middle part of names such as `model.fp16.safetensors`.

    Raises:
        WeightsError: Nothing is there, a directory has no weights, the index is damaged or names
            files that are absent.
    """
    if not isinstance(path, str | os.PathLike):
        return _from_list([Path(item) for item in path])
    path = Path(path)
    if path.is_dir():
        return _from_directory(path, variant)
    if not path.is_file():
        near = get_close_matches(path.name, _names(path.parent), 3, 0.4)
        have = (
            f"near it: {', '.join(near)}"
            if near
            else f"{path.parent} holds {_listing(path.parent)}"
        )
        raise WeightsError(f"Open the checkpoint {path}.", f"there is no such file ({have})")
    if _INDEX.search(path.name):
        return _from_index(path)
    return _from_list([path])


def layout_of(files: CheckpointFiles) -> dict[str, TensorEntry]:
    """Returns where each tensor of a safetensors checkpoint lies, from the headers alone.

    Raises:
        WeightsError: A file is damaged, two files hold the same tensor, or the index and the files
            disagree.
    """
    entries: dict[str, TensorEntry] = {}
    problems = []
    for file in files.files:
        for name, entry in read_header(file)[0].items():
            if name in entries:
                problems.append(f"{name} is in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    problems += index_problems(files, {name: entry.file for name, entry in entries.items()})
    if problems:
        raise WeightsError(f"Open the checkpoint {files.origin}.", problems[:8])
    return entries


def index_problems(files: CheckpointFiles, found: dict[str, Path]) -> list[str]:
    """Returns where the index and the tensors that the files really hold disagree."""
    problems = []
    for name, file in (files.index or {}).items():
        actual = found.get(name)
        if actual is None:
            near = get_close_matches(name, [n for n, f in found.items() if f == file], 2)
            hint = f" (near: {', '.join(near)})" if near else ""
            problems.append(f"the index places {name} in {file.name}, which does not hold it{hint}")
        elif actual != file:
            problems.append(f"the index places {name} in {file.name}, but {actual.name} holds it")
    return problems


def _from_list(paths: list[Path]) -> CheckpointFiles:
    origin = ", ".join(str(path) for path in paths)
    asked = f"Open the checkpoint {origin}."
    absent = [f"{path} does not exist" for path in paths if not path.is_file()]
    kinds = {_SUFFIXES.get(path.suffix) for path in paths}
    if absent or not paths:
        raise WeightsError(asked, absent or "no file was named")
    kind = kinds.pop()
    if kind is None or kinds:
        raise WeightsError(
            asked,
            f"the names end in {', '.join(sorted({path.suffix for path in paths}))}",
            f"Give files of one of these kinds: {', '.join(_SUFFIXES)}.",
        )
    return CheckpointFiles(kind, tuple(paths), None, origin)


def _from_directory(path: Path, variant: str | None) -> CheckpointFiles:
    dot = f".{variant}" if variant else ""
    wanted = [
        f"model{dot}.safetensors",
        f"model.safetensors.index{dot}.json",
        f"pytorch_model{dot}.bin",
        f"pytorch_model.bin.index{dot}.json",
    ]
    for name in wanted:
        if (path / name).is_file():
            return _from_index(path / name) if "index" in name else _from_list([path / name])
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return _from_list(gguf)
    config = (path / "config.json").is_file()
    what = "it holds a config.json but no weights" if config else "no weights"
    raise WeightsError(
        f"Open the checkpoint {path}.",
        f"{what}: looked for {', '.join(wanted)} and one *.gguf, found {_listing(path)}",
        ["Give the weight file itself.", "Build the model from its config, with random weights."],
    )


def _from_index(path: Path) -> CheckpointFiles:
    asked = f"Read the index {path}."
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        index = {str(name): path.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(asked, f"no usable weight_map in it: {error!r}") from error
    files = tuple(sorted(set(index.values())))
    outside = [str(file.name) for file in files if file.parent.resolve() != path.parent.resolve()]
    absent = [
        f"{file.name} is named by the index but absent" for file in files if not file.is_file()
    ]
    if outside:
        raise WeightsError(asked, f"it names files outside of its directory: {', '.join(outside)}")
    if absent or not files:
        raise WeightsError(
            asked, absent or "it names no file", f"The directory holds {_listing(path.parent)}."
        )
    listed = _from_list(list(files))
    return CheckpointFiles(listed.kind, files, index, str(path.parent))


def _names(directory: Path) -> Iterable[str]:
    return sorted(item.name for item in directory.iterdir()) if directory.is_dir() else []


def _listing(directory: Path) -> str:
    names = list(_names(directory))
    if not names:
        return "nothing" if directory.is_dir() else "nothing (it does not exist)"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
