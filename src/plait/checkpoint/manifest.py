"""The manifest: what a checkpoint holds and what its files must be, as JSON.

It is written last. Whoever reads a checkpoint begins here, and needs nothing that is pickled.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.boxes import Box
from plait.checkpoint.files import FileRecord, record, write
from plait.errors import CheckpointError

NAME = "manifest.json"
TRAINING = "training.pt"
PRETRAINED = "pretrained"
MODEL = "model."
OPTIMIZER = "optimizer."
VERSION = 1
_FORMAT = "plait checkpoint"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are.

    Attributes:
        box: Which part of the whole.
        file: The file's name.
        offset: Where in the file it begins.
        nbytes: How much of the file it takes.
    """

    box: Box
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """One whole tensor.

    Attributes:
        shape: Of the whole.
        dtype: Its dtype.
        chunks: Where its parts are; together they are the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
        step: Of the training.
        layout: The axes with their sizes, outer to inner, of the ranks that wrote it.
        data_ranks: For each rank its place among those that see different samples.
        tensors: By key: `model.` or `optimizer.` and the parameter's name.
        tied: Other names of parameters → the name under which they are stored.
        files: Every other file of the folder by its path in it.
        about: Free-form: the model's class, the versions of the libraries.
    """

    step: int
    layout: Mapping[str, int]
    data_ranks: tuple[int, ...]
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    files: Mapping[str, FileRecord]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_names(self) -> list[str]:
        """The parameters and buffers."""
        return [key.removeprefix(MODEL) for key in self.tensors if key.startswith(MODEL)]


def rank_file(index: int) -> str:
    """The name of the file of what each rank has for itself."""
    return f"rank-{index:05d}.pt"


def words(layout: Mapping[str, int]) -> str:
    """A layout for people: `dp_shard 2 × tp 3`."""
    return " × ".join(f"{axis} {size}" for axis, size in layout.items()) or "one process"


def store(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a folder and brings it to the disk."""
    content = {
        "format": _FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "layout": words(manifest.layout),
        "axes": dict(manifest.layout),
        "data_ranks": list(manifest.data_ranks),
        "about": dict(manifest.about),
        "files": {name: dataclasses.asdict(file) for name, file in manifest.files.items()},
        "tied": dict(manifest.tied),
        "tensors": {key: _as_json(tensor) for key, tensor in manifest.tensors.items()},
    }
    text = json.dumps({**content, "sha256": _digest(content)}, indent=1)
    write(folder / NAME, text.encode())


def read(folder: Path) -> Manifest:
    """Reads the manifest of a folder.

    Raises:
        CheckpointError: It is missing, damaged, or of a later version; `problems` say which.
    """
    asked = f"The checkpoint {folder.name}:"
    try:
        content = json.loads((folder / NAME).read_bytes())
        if content.pop("format") != _FORMAT:
            raise CheckpointError(asked, f"{NAME} is not of a checkpoint of plait")
        if content["version"] > VERSION:
            raise CheckpointError(
                asked, f"its version is {content['version']}, this plait reads up to {VERSION}"
            )
        given = content.pop("sha256")
        if given != _digest({"format": _FORMAT, **content}):
            raise CheckpointError(asked, f"{NAME} is damaged: it is not what was written")
        return Manifest(
            content["step"],
            content["axes"],
            tuple(content["data_ranks"]),
            {key: _from_json(entry) for key, entry in content["tensors"].items()},
            content["tied"],
            {name: FileRecord(**file) for name, file in content["files"].items()},
            content["about"],
        )
    except FileNotFoundError:
        raise CheckpointError(asked, f"it has no {NAME}") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{NAME} cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(asked, problem) from None


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a folder, as far as their sizes tell."""
    problems = []
    for name, file in manifest.files.items():
        try:
            nbytes = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if nbytes != file.nbytes:
            problems.append(f"{name} has {nbytes:,} bytes, of {file.nbytes:,} that were written")
    return problems


def wrong_content(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Which of some files do not hold what was written. Reads them."""
    problems = []
    for name in names:
        try:
            found = record(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != manifest.files[name]:
            problems.append(f"{name} is damaged: its checksum is another than when it was written")
    return problems


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "chunks": [
            [list(c.box[0]), list(c.box[1]), c.file, c.offset, c.nbytes] for c in tensor.chunks
        ],
    }


def _from_json(entry: Mapping[str, Any]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    chunks = tuple(
        Chunk((tuple(offsets), tuple(sizes)), file, offset, nbytes)
        for offsets, sizes, file, offset, nbytes in entry["chunks"]
    )
    return StoredTensor(tuple(entry["shape"]), dtype, chunks)
