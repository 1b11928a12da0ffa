"""Whether a checkpoint fits what it is to go into. Nothing is changed here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint import finding, optimizers
from plait.checkpoint.files import packed, unpacked
from plait.checkpoint.held import HeldModel, held_model
from plait.checkpoint.manifest import MODEL, TRAINING, Manifest, rank_file
from plait.checkpoint.ranks import Place
from plait.errors import CheckpointError


@dataclass(frozen=True)
class Ready:
    """All that is known before the first tensor is changed.

    Attributes:
        folder: The checkpoint.
        stored: What it holds.
        model: What the model holds.
        training: The content of the file for all ranks.
        own: Random numbers and position in the data of this rank.
        stored_name: Names of the model → those stored.
    """

    folder: Path
    stored: Manifest
    model: HeldModel
    training: Mapping[str, Any]
    own: Mapping[str, Any]
    stored_name: Mapping[str, str]

    @property
    def name_here(self) -> dict[str, str]:
        """Stored names → those of the model; the first where it has several."""
        return names_here(self.stored_name)


def prepare(
    asked: str,
    folder: Path,
    stored: Manifest,
    model: nn.Module,
    given: Mapping[str, Any],
    place: Place,
) -> Ready:
    """Compares a checkpoint with what it is to go into.

    Args:
        asked: For the message.
        folder: The checkpoint.
        stored: What it holds.
        model: The model.
        given: The optimizer, scheduler and data, by these names; None where there is none.
        place: This rank's place.

    Raises:
        CheckpointError: It does not fit; every problem is listed.
    """
    held = held_model(model)
    training = unpacked((folder / TRAINING).read_bytes())
    stored_name, problems = _names(held, stored)
    for name, tensor in held.tensors.items():
        if tensor.local.is_meta:
            problems.append(f"{name} has no memory yet (meta)")
    for what in ("optimizer", "scheduler"):
        if given[what] is not None and training[what] is None:
            problems.append(f"no {what} was saved")
    problems += _other_scheduler(given["scheduler"], training)
    if given["optimizer"] is not None and training["optimizer"] is not None and not problems:
        problems += optimizers.mismatch(
            given["optimizer"],
            held,
            training["optimizer"],
            stored.tensors,
            names_here(stored_name),
        )
    problems += [
        f"the extra state {name} is in only one of the two"
        for name in sorted(set(held.extra) ^ set(training["extra_state"]))
    ]
    own, wrong = _own_values(folder, stored, place, given["data"] is not None)
    problems += wrong
    if problems:
        ways = ["give what was saved: the same architecture, optimizer and groups"]
        raise CheckpointError(asked, finding.first([f"{folder.name}: {p}" for p in problems]), ways)
    return Ready(folder, stored, held, training, own, stored_name)


def _other_scheduler(scheduler: Any, training: Mapping[str, Any]) -> list[str]:
    """A scheduler takes any content without a word, so its class and its groups are compared."""
    kept = training["scheduler"]
    if scheduler is None or kept is None:
        return []
    ours, theirs = type(scheduler).__name__, training.get("scheduler_class")
    if theirs is not None and ours != theirs:  # earlier versions did not keep it
        return [f"the scheduler is {ours}, the stored one {theirs}"]
    rates = getattr(scheduler, "base_lrs", None)
    stored = kept.get("base_lrs") if isinstance(kept, dict) else None
    if isinstance(rates, list) and isinstance(stored, list) and len(rates) != len(stored):
        return [f"the scheduler has {len(rates)} groups, the stored one {len(stored)}"]
    return []


def names_here(stored_name: Mapping[str, str]) -> dict[str, str]:
    """Stored names → those of the model; the first where it has several."""
    return {there: here for here, there in reversed(list(stored_name.items()))}


def _names(held: HeldModel, stored: Manifest) -> tuple[dict[str, str], list[str]]:
    """The model's names → those stored, and what does not fit."""
    found: dict[str, str] = {}
    problems = []
    for name, tensor in held.tensors.items():
        names = [name, *(other for other, first in held.tied.items() if first == name)]
        there = [n for n in {stored.tied.get(n, n): None for n in names} if _has(stored, n)]
        if not there:
            problems.append(f"{name} is missing in it")
            continue
        if len(there) > 1:
            problems.append(f"{' and '.join(there)} are two tensors in it, one in the model")
        found[name] = there[0]
        shape, dtype = (
            stored.tensors[MODEL + there[0]].shape,
            stored.tensors[MODEL + there[0]].dtype,
        )
        if shape != tensor.shape:
            problems.append(f"{name}: shape {shape} in it, {tensor.shape} in the model")
        if _kind(dtype) != _kind(tensor.local.dtype):
            problems.append(f"{name}: {dtype} in it, {tensor.local.dtype} in the model")
    used = set(found.values())
    problems += [f"{n} is not in the model" for n in stored.model_names if n not in used]
    return found, problems


def _kind(dtype: torch.dtype) -> str:
    """Between numbers of one kind a load casts; between kinds it would lose what they say."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "real"
    return "truth" if dtype == torch.bool else "whole"


def _has(stored: Manifest, name: str) -> bool:
    return MODEL + name in stored.tensors


def _own_values(
    folder: Path, stored: Manifest, place: Place, with_data: bool
) -> tuple[dict[str, Any], list[str]]:
    """Random numbers and position in the data of this rank."""

    def of(index: int) -> dict[str, Any]:
        return unpacked((folder / rank_file(index)).read_bytes())

    same = dict(stored.layout) == dict(place.layout)
    own = of(place.index if same else 0)
    if not with_data:
        return {"rng": own["rng"], "data": None}, []
    firsts = {data: rank for rank, data in reversed(list(enumerate(stored.data_ranks)))}
    if len(firsts) == place.num_data_ranks:
        position = of(firsts[place.data_index])["data"]
    else:
        contents = [of(rank) for rank in firsts.values()]
        position = contents[0]["data"]
        positions = {packed("", data=content["data"]) for content in contents}
        if len(positions) > 1:
            return {}, [
                f"its {len(firsts)} data ranks were at different positions in the data, and "
                f"there are {place.num_data_ranks} now"
            ]
    if position is None:
        return {}, ["no position in the data was saved"]
    return {"rng": own["rng"], "data": position}, []
