"""Saving the state of a training: every rank its part, all or nothing."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from plait.checkpoint import background, folders, randomness, writing
from plait.checkpoint.background import Saving
from plait.checkpoint.boxes import Whole, shares
from plait.checkpoint.files import packed
from plait.checkpoint.held import Held, HeldModel, held_model, mesh_of, plain
from plait.checkpoint.optimizers import HeldOptimizer, held_optimizer
from plait.checkpoint.pretrained import Pretrained, pretrained
from plait.checkpoint.ranks import Place, place_of
from plait.checkpoint.writing import Job
from plait.errors import CheckpointError
from plait.run import environment
from plait.state import own_class
from plait.styles.quantized import refuse_quantized
from plait.weights.outcome import agree, arrive, meet, settle, together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class _Collected:
    """What this rank has to save, looked at before any rank is met."""

    model: HeldModel
    tensors: Mapping[str, Held]
    training: bytes
    own: bytes
    pretrained: Pretrained | None


def save(  # noqa: PLR0913 (what a training is made of)
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int | None = None,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    keep: int | None = 3,
    asynchronous: bool = False,
) -> Path | Saving:
    """Save the state of a training; all ranks must call it.

    Every rank writes what it holds, and of copies one rank each. The checkpoint appears under its
    name when all of it is on the disk; until then, and if a rank fails or is killed, the ones
    before it stay as they are. It is read by `load` into any layout.

    Args:
        directory: Where the checkpoints of the run are; all ranks must see the same. One run
            writes to it at a time.
        model: The model, split or not.
        optimizer: An optimizer of its parameters.
        scheduler: What has a `state_dict`, such as a learning-rate scheduler.
        step: The step of the training; by default one more than that of the latest checkpoint.
        data: What has a `state_dict`: the position in the data. Each rank's is kept.
        extra: Values of the user's; the first rank's are kept.
        tokenizer: A tokenizer or processor, to be kept beside a model of transformers.
        keep: How many checkpoints stay; older ones are deleted once the new one is there. None:
            all.
        asynchronous: Return when all is copied to the host's memory; the rest is done by a thread.
            The next save and the end of the process wait for it.

    Returns:
        The checkpoint; with `asynchronous` a [`Saving`][plait.checkpoint.Saving], whose `wait()`
        returns it.

    Raises:
        CheckpointError: Something cannot be stored, the directory cannot be written, the disk is
            too small, or the last asynchronous save failed.
        RankError: Another rank failed, or did not call within ten seconds.

    Comm: a few control messages. No tensor travels between ranks.
    """
    model = plain(model)
    mesh = mesh_of(model)
    place, asked = place_of(mesh), f"plait.checkpoint.save({os.fspath(directory)!r}):"
    failure: Exception | None = None
    collected = None
    try:
        background.finish()
        _check_arguments(asked, mesh, step, keep)
        refuse_quantized(model, asked, "train adapters, and save these: save_pretrained")
        given = (optimizer, scheduler, data, extra, tokenizer)
        collected = _collect(asked, model, given, place.is_first)
    except Exception as error:
        failure = error
    told = arrive(
        mesh,
        asked,
        "plait.checkpoint.save",
        content={} if collected is None else _boxes(collected),
        failure=failure,
        ways_out=["call plait.checkpoint.save on all ranks: each writes what it holds"],
    )
    assert collected is not None
    wholes = {key: held.whole for key, held in collected.tensors.items()}
    agree(mesh, asked, repr((sorted(wholes.items()), step, keep, asynchronous)))
    mine = shares(asked, wholes, told)[place.index]
    partial, final = _begin(mesh, asked, Path(directory), step, wholes, place)
    job = Job(
        asked=asked,
        place=place,
        partial=partial,
        final=final,
        tensors={key: (held.shape, held.local.dtype) for key, held in collected.tensors.items()},
        shares=mine,
        source=lambda key, box: collected.tensors[key].part(box),
        own=collected.own,
        training=collected.training,
        tied=collected.model.tied,
        pretrained=collected.pretrained,
        model_class=own_class(model).__name__,
        keep=keep,
    )
    if asynchronous:
        copied = together(mesh, asked, lambda: job.copied())
        return background.start(copied)
    return _write(mesh, asked, job)


def _write(mesh: "DeviceMesh | None", asked: str, job: Job) -> Path:
    """Writes, meets, and lets the first rank commit; takes away what a failed save wrote."""
    try:
        report, failure = None, None
        try:
            report = writing.write_part(job)
        except Exception as error:
            failure = error
        reports = meet(mesh, "parts are written", report, failure, asked)
        if job.place.is_first:
            try:
                writing.commit(job, reports)
            except Exception as error:
                failure = error
        settle(mesh, asked, failure)
    except BaseException:
        if job.place.is_first:
            shutil.rmtree(job.partial, ignore_errors=True)
        raise
    return job.final


def _check_arguments(asked: str, mesh: "DeviceMesh | None", step: object, keep: object) -> None:
    problems = []
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        problems.append(f"step={step!r} is no step: give a whole number from 0")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        problems.append(f"keep={keep!r}: give a whole number from 1, or None to keep all")
    count = environment.world().world_size
    if mesh is None and count > 1:
        problems.append(
            f"the model is not split, and there are {count} ranks: each would save a copy of it"
        )
    if problems:
        raise CheckpointError(asked, problems, "plait.parallelize the model first" * (mesh is None))


def _collect(asked: str, model: nn.Module, given: tuple[Any, ...], is_first: bool) -> _Collected:
    """Everything that this rank holds, and all refusals that it can know of by itself."""
    optimizer, scheduler, data, extra, tokenizer = given
    held = held_model(model)
    problems = [f"{n} has no memory yet (meta)" for n, x in held.tensors.items() if x.local.is_meta]
    states = HeldOptimizer({}, {})
    if optimizer is not None:
        states, wrong = held_optimizer(optimizer, held)
        problems += wrong
    if problems:
        raise CheckpointError(asked, problems)
    training = packed(
        asked,
        optimizer=dict(states.record) or None,
        scheduler=None if scheduler is None else scheduler.state_dict(),
        scheduler_class=None if scheduler is None else type(scheduler).__name__,
        extra=dict(extra or {}),
        extra_state=dict(held.extra),
    )
    own = packed(asked, rng=randomness.capture(), data=None if data is None else data.state_dict())
    beside = pretrained(model, held, tokenizer) if is_first else None
    return _Collected(held, {**held.keyed(), **states.tensors}, training, own, beside)


def _boxes(collected: _Collected) -> dict[str, list[Any]]:
    return {name: held.boxes for name, held in collected.model.tensors.items()}


def _begin(
    mesh: "DeviceMesh | None",
    asked: str,
    directory: Path,
    step: int | None,
    wholes: Mapping[str, Whole],
    place: Place,
) -> tuple[Path, Path]:
    """The first rank makes the folder; all learn its name."""
    needed = sum(whole.nbytes for whole in wholes.values())
    names: tuple[str, str] | None = None
    failure: Exception | None = None
    if place.is_first:
        try:
            partial, final = folders.begin(asked, directory, step, needed)
            names = partial.name, final.name
        except Exception as error:
            failure = error
    told = meet(mesh, "the folder is made", names, failure, asked)
    return directory / told[0][0], directory / told[0][1]
