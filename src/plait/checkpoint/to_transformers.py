"""From a checkpoint to a directory that plain transformers reads: one process, tensor by tensor."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.checkpoint import finding, folders, manifest
from plait.checkpoint.manifest import PRETRAINED
from plait.checkpoint.reading import CheckpointStore
from plait.errors import CheckpointError
from plait.hf import exporting, skeleton
from plait.weights import save
from plait.weights.loading import human_bytes

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote.

    Attributes:
        path: Where.
        num_tensors: How many tensors.
        nbytes: Their bytes.
        unexpected: Tensors of the source that the model does not use.
    """

    path: Path
    num_tensors: int
    nbytes: int
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        left = f"; not used: {', '.join(self.unexpected[:4])}" if self.unexpected else ""
        return f"{self.path}: {self.num_tensors} tensors, {human_bytes(self.nbytes)}{left}"


def is_plait(path: Path) -> bool:
    """Whether a path is a checkpoint of plait, or a directory of them."""
    return (path / manifest.NAME).exists() or bool(folders.committed(path))


def to_transformers(
    directory: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    progress: Progress | None = None,
) -> Converted:
    """Writes the model of a checkpoint as a directory that plain transformers reads.

    Args:
        directory: As given to `plait.checkpoint.save`, or one checkpoint in it.
        target: Where to.
        step: Which checkpoint; the latest by default.
        dtype: Of the floating tensors; by default each as it is stored.
        max_shard_size: The largest weight file, in bytes or as in `"5GB"`.
        progress: Called with the bytes written so far and in all.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model is not one of
            transformers.
        WeightsError: The target cannot be written.

    Comm: none.
    """
    asked = f"Convert {directory}:"
    folder, stored = finding.open_checkpoint(asked, directory, step)
    names = stored.about.get("stored")
    if not names:
        raise CheckpointError(
            asked,
            f"{folder.name} is of a {stored.about.get('model_class')}, for which it is not known "
            "what transformers' files would hold",
            "make the model, plait.checkpoint.load into it, and save that",
        )
    model = exporting.empty_copy(
        folder / PRETRAINED, stored.about["model_class"], set(stored.model_names)
    )
    rule = _as_stored if dtype is None else skeleton.dtype_rule(model.to(dtype), dtype)
    own = {name: stored.tied.get(name, name) for name in [*stored.model_names, *stored.tied]}
    store = CheckpointStore(folder, stored, own, rule)
    recipes = exporting.recipes_of(model, store, exporting.described(names))
    report = save(store, recipes, target, max_shard_size=max_shard_size, progress=progress)
    for path in sorted((folder / PRETRAINED).rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(folder / PRETRAINED)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    if dtype is not None:
        config = json.loads((target / "config.json").read_text("utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return Converted(target, len(recipes), report.total_bytes)


def _as_stored(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype
