"""Reading a checkpoint into a model of any layout."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from plait.checkpoint import folders, manifest, optimizers, randomness
from plait.checkpoint.files import packed, unpacked
from plait.checkpoint.held import Held, HeldModel, held_model, mesh_of, plain
from plait.checkpoint.manifest import MODEL, TRAINING, Manifest, rank_file
from plait.checkpoint.planners import ChunkReader
from plait.checkpoint.ranks import Place, place_of
from plait.errors import CheckpointError
from plait.weights.outcome import arrive, settle, together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SHOWN = 12


@dataclass(frozen=True)
class Loaded:
    """What `load` found.

    Attributes:
        step: The step of the training.
        extra: What was given to `save` as `extra`.
        path: The checkpoint.
    """

    step: int
    extra: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class _Ready:
    """All that is known before the first tensor is changed."""

    folder: Path
    stored: Manifest
    model: HeldModel
    training: Mapping[str, Any]
    own: Mapping[str, Any]
    name_here: Mapping[str, str]


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    data: Any = None,
    step: int | None = None,
) -> Loaded:
    """Read a checkpoint into a model, whatever the layout it was saved with.

    Everything is checked before anything is changed: the sizes and checksums of the files, names
    and shapes. Then parameters, buffers and the optimizer's state are filled in place.

    Args:
        directory: As given to `save`, or one checkpoint in it.
        model: The model, split or not; its weights in memory.
        optimizer: An optimizer of its parameters, of the class that was saved; None leaves out
            what is stored. How it computes (`foreach`, `fused`, `capturable`) stays as it is.
        scheduler: What has a `load_state_dict`; None leaves out what is stored.
        data: What has a `load_state_dict`: the position in the data. Each rank gets that of its
            data rank; where the number of data ranks is another, the one that all had.
        step: Which checkpoint; the latest by default.

    Returns:
        The step and the user's own values.

    The states of the random number generators are set too: each rank's own where the layout is the
    one that was saved, else the first rank's on all.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or it does not fit. Nothing has
            been changed.
        RankError: Another rank refused, or did not call.

    Comm: a few control messages. No tensor travels between ranks.
    """
    model = plain(model)
    mesh = mesh_of(model)
    asked = f"plait.checkpoint.load({os.fspath(directory)!r}):"
    place = place_of(mesh)
    failure: Exception | None = None
    folder, stored = Path(directory), None
    try:
        folder = _choose(asked, Path(directory), step)
        stored = _sound(asked, folder)
    except CheckpointError as error:
        failure = error
    ways = ["call plait.checkpoint.load on all ranks: each reads its part"]
    told = arrive(mesh, asked, "plait.checkpoint.load", folder.name, failure, ways)
    assert stored is not None
    if len(set(told)) > 1:
        raise CheckpointError(
            asked, f"the ranks found different checkpoints: {', '.join(sorted(set(told)))}"
        )
    given = {"optimizer": optimizer, "scheduler": scheduler, "data": data}
    together(mesh, asked, lambda: _check_content(asked, folder, stored, place))
    ready = together(mesh, asked, lambda: _prepare(asked, folder, stored, model, given, place))
    _fill(mesh, asked, ready, model, given)
    return Loaded(stored.step, dict(ready.training["extra"]), folder)


def open_checkpoint(asked: str, directory: Path, step: int | None) -> tuple[Path, Manifest]:
    """One checkpoint, all of it checked by this process alone.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    folder = _choose(asked, directory, step)
    stored = _sound(asked, folder)
    _check_content(asked, folder, stored, place_of(None))
    return folder, stored


def _choose(asked: str, directory: Path, step: int | None) -> Path:
    """The folder that is meant."""
    if step is None and (directory / manifest.NAME).exists():
        return directory
    found = folders.committed(directory)
    if step is not None:
        found = [folder for folder in found if folders.step_of(folder) == step]
    if found:
        return found[-1]
    have = sorted({folders.step_of(folder) for folder in folders.committed(directory)})
    problem = f"there is no checkpoint of step {step}" if step is not None else "none is there"
    ways = [f"step={have[-1]}, of {', '.join(map(str, have[-5:]))} that are there"] if have else []
    raise CheckpointError(asked, problem, ways)


def _sound(asked: str, folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are there."""
    try:
        stored = manifest.read(folder)
        problems = manifest.wrong_sizes(folder, stored)
    except CheckpointError as error:
        stored, problems = None, list(error.problems)
    if stored is None or problems:
        raise _damaged(asked, folder, problems)
    return stored


def _damaged(asked: str, folder: Path, problems: list[str]) -> CheckpointError:
    """The error of a checkpoint that cannot be used, with the one before it where that can."""
    ways = []
    before = [f for f in folders.committed(folder.parent) if folders.step_of(f) < _step(folder)]
    for other in reversed(before):
        try:
            if not manifest.wrong_sizes(other, manifest.read(other)):
                ways.append(f"step={folders.step_of(other)}: {other.name} is complete")
                break
        except CheckpointError:
            continue
    named = [f"{folder.name}: {problem}" for problem in problems]
    ways.append("delete the damaged folder: the latest of the others is taken then")
    return CheckpointError(asked, _first(named), ways)


def _step(folder: Path) -> int:
    return folders.step_of(folder) if folders.is_checkpoint(folder) else 0


def _check_content(asked: str, folder: Path, stored: Manifest, place: Place) -> None:
    """Compares checksums: every rank those of its share of the files."""
    names = sorted(stored.files, key=lambda name: -stored.files[name].nbytes)
    problems = manifest.wrong_content(folder, stored, names[place.index :: place.num_ranks])
    if problems:
        raise _damaged(asked, folder, problems)


def _prepare(
    asked: str,
    folder: Path,
    stored: Manifest,
    model: nn.Module,
    given: Mapping[str, Any],
    place: Place,
) -> _Ready:
    """Compares the checkpoint with what it is to go into; changes nothing."""
    held = held_model(model)
    training = unpacked((folder / TRAINING).read_bytes())
    name_here, problems = _names(held, stored)
    for name, tensor in held.tensors.items():
        if tensor.local.is_meta:
            problems.append(f"{name} has no memory yet (meta)")
    for what in ("optimizer", "scheduler"):
        if given[what] is not None and training[what] is None:
            problems.append(f"no {what} was saved")
    if given["optimizer"] is not None and training["optimizer"] is not None and not problems:
        problems += optimizers.mismatch(given["optimizer"], held, training["optimizer"], name_here)
    problems += [
        f"the extra state {name} is in only one of the two"
        for name in sorted(set(held.extra) ^ set(training["extra_state"]))
    ]
    own, wrong = _own_values(folder, stored, place, given["data"] is not None)
    problems += wrong
    if problems:
        ways = ["give what was saved: the same architecture, optimizer and groups"]
        raise CheckpointError(asked, _first([f"{folder.name}: {p}" for p in problems]), ways)
    return _Ready(folder, stored, held, training, own, name_here)


def _names(held: HeldModel, stored: Manifest) -> tuple[dict[str, str], list[str]]:
    """The stored parameters' names → those of this model, and what does not fit."""
    name_here, problems = {}, []
    wanted: dict[str, str] = {}
    for name in held.tensors:
        names = [name, *(other for other, first in held.tied.items() if first == name)]
        there = [n for n in {stored.tied.get(n, n): None for n in names} if _has(stored, n)]
        if len(there) > 1:
            problems.append(f"{' and '.join(there)} are two tensors in it, one in the model")
        if not there:
            problems.append(f"{name} is missing in it")
            continue
        wanted[name] = there[0]
        name_here[there[0]] = name
        shape = stored.tensors[MODEL + there[0]].shape
        if shape != held.tensors[name].shape:
            problems.append(f"{name}: shape {shape} in it, {held.tensors[name].shape} in the model")
    used = set(wanted.values())
    problems += [f"{n} is not in the model" for n in stored.model_names if n not in used]
    return name_here, problems


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


def _fill(
    mesh: "DeviceMesh | None",
    asked: str,
    ready: _Ready,
    model: nn.Module,
    given: Mapping[str, Any],
) -> None:
    """Changes the model, the optimizer and the rest."""
    failure: Exception | None = None
    try:
        held, names = ready.model, ready.name_here
        wanted: dict[str, Held] = {
            MODEL + there: held.tensors[here] for there, here in names.items()
        }
        optimizer, record = given["optimizer"], ready.training["optimizer"]
        if optimizer is not None:
            wanted |= optimizers.places(optimizer, held, record, ready.stored.tensors, names)
        ChunkReader(ready.folder, ready.stored).fill(wanted)
        if optimizer is not None:
            optimizers.restore(optimizer, held, record, wanted, names)
        _set_extra(model, ready.training["extra_state"])
        if given["scheduler"] is not None:
            given["scheduler"].load_state_dict(ready.training["scheduler"])
        if given["data"] is not None:
            given["data"].load_state_dict(ready.own["data"])
        if ready.own["rng"] is not None:  # none where it came from the files of a model
            randomness.restore(ready.own["rng"])
    except Exception as error:
        failure = error
    settle(mesh, asked, failure)


def _set_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _first(problems: list[str]) -> list[str]:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return problems[:_SHOWN] + more
