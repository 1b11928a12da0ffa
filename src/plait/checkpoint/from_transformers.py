"""From the weight files of a model to a checkpoint of plait: one process, tensor by tensor."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import folders, writing
from plait.checkpoint.files import packed
from plait.checkpoint.held import held_model
from plait.checkpoint.manifest import MODEL
from plait.checkpoint.pretrained import Pretrained
from plait.checkpoint.ranks import place_of
from plait.checkpoint.to_transformers import Converted, Progress
from plait.checkpoint.writing import Job
from plait.errors import CheckpointError
from plait.hf import arguments, exporting, gguf, skeleton
from plait.hf import source as sources
from plait.hf.conversion import Conversion, convert
from plait.weights import Checkpoint, mismatches

_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files beside the weights: configs and tokenizers."""


def from_transformers(
    path: str,
    target: Path,
    auto_class: Any,
    *,
    step: int = 0,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint that `plait.checkpoint.load` reads into any layout.

    Args:
        path: A directory, a GGUF file, or a model's name on the hub.
        target: The directory in which the checkpoint appears.
        auto_class: The auto class of transformers that would read it.
        step: The step that it is said to be of.
        dtype: Of the floating tensors; by default each as it is stored.
        progress: Called with the bytes written so far and in all.

    Raises:
        WeightsError: There is no such model, or its files do not hold what it needs.
        CheckpointError: The target cannot be written.

    Comm: none.
    """
    asked = f"Convert {path}:"
    source = sources.find(auto_class, path, {}, arguments.sort(path, {}))
    chosen = skeleton.choose_dtype(dtype, source.config, lambda: torch.float32)
    model = skeleton.empty_model(
        auto_class, source.config, chosen, source.model_kwargs, source.model_class
    )
    with source.open() as checkpoint:
        conversion = _conversion(asked, source, model, checkpoint)
        skeleton.untie(model, conversion.untied)
        model.__dict__["_weight_conversions"] = list(conversion.transforms)
        rule = skeleton.dtype_rule(model, chosen)
        job = _job(asked, model, checkpoint, conversion, rule if dtype is not None else None)
        nbytes = sum(math.prod(shape) * kind.itemsize for shape, kind in job.tensors.values())
        partial, final = folders.begin(asked, target, step, nbytes)
        job = dataclasses.replace(
            job, partial=partial, final=final, pretrained=_pretrained(model, job, Path(path), dtype)
        )
        writing.commit(job, [writing.write_part(_told(job, progress, nbytes))])
    return Converted(job.final, len(job.tensors), nbytes, conversion.unexpected)


def _conversion(
    asked: str, source: sources.Source, model: Any, checkpoint: Checkpoint
) -> Conversion:
    if source.is_gguf:
        conversion = gguf.gguf_conversion(model, checkpoint)
    else:
        conversion = convert(model, checkpoint)
    problems = [f"{name} is in no file" for name in conversion.missing]
    problems += [
        f"{name}: {found} in the files, {wanted} in the model"
        for name, (found, wanted) in mismatches(model, checkpoint, conversion.recipes).items()
    ]
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        raise CheckpointError(
            asked, problems[:12] + more, "read it with from_pretrained, which initialises them"
        )
    return conversion


def _job(
    asked: str,
    model: Any,
    checkpoint: Checkpoint,
    conversion: Conversion,
    rule: Callable[[str, torch.dtype], torch.dtype] | None,
) -> Job:
    """What there is to write, the place not yet chosen."""
    held = held_model(model)
    tensors, shares = {}, {}
    for name, x in held.tensors.items():
        dtype = conversion.recipes[name].dtype(checkpoint)
        tensors[MODEL + name] = (x.shape, dtype if rule is None else rule(name, dtype))
        shares[MODEL + name] = [((0,) * len(x.shape), x.shape)]

    def read(key: str, box: Any) -> torch.Tensor:
        recipe = conversion.recipes[key.removeprefix(MODEL)]
        return recipe.read(checkpoint, dtype=tensors[key][1])

    return Job(
        asked=asked,
        place=place_of(None),
        partial=Path(),
        final=Path(),
        tensors=tensors,
        shares=shares,
        source=read,
        own=packed(asked, rng=None, data=None),
        training=packed(asked, optimizer=None, scheduler=None, extra={}, extra_state={}),
        tied=held.tied,
        pretrained=None,
        model_class=type(model).__name__,
        keep=None,
    )


def _told(job: Job, progress: Progress | None, total: int) -> Job:
    """The same, telling how much has been read."""
    done = 0

    def read(key: str, box: Any) -> torch.Tensor:
        nonlocal done
        x = job.source(key, box)
        done += x.numel() * x.element_size()
        if progress is not None:
            progress(done, total)
        return x

    return dataclasses.replace(job, source=read)


def _pretrained(model: Any, job: Job, path: Path, dtype: torch.dtype | None) -> Pretrained:
    """The files beside the weights: those of the source's directory, else what the model has."""
    tensors = {key.removeprefix(MODEL): entry for key, entry in job.tensors.items()}
    tensors |= {name: tensors[first] for name, first in job.tied.items()}
    stored = exporting.stored_tensors(model, tensors)
    if not path.is_dir():
        return Pretrained(exporting.files_beside(model), stored)
    files = {
        file.name: file.read_bytes()
        for file in sorted(path.iterdir())
        if file.suffix in _BESIDE and not file.name.endswith(".index.json")
    }
    if dtype is not None:
        config = json.loads(files["config.json"])
        config["dtype"] = str(dtype).removeprefix("torch.")
        files["config.json"] = json.dumps(config, indent=2).encode()
    return Pretrained(files, stored)
