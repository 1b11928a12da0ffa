"""Reading a checkpoint into a model of any layout."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from plait.checkpoint import background, finding, optimizers, randomness, undoing
from plait.checkpoint.fitting import Ready, prepare
from plait.checkpoint.held import Held, mesh_of, plain
from plait.checkpoint.manifest import MODEL
from plait.checkpoint.planners import ChunkReader
from plait.checkpoint.ranks import place_of
from plait.errors import CheckpointError
from plait.weights.outcome import arrive, settle, together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

    Everything is checked before anything is changed: the sizes and checksums of the files, names,
    shapes and kinds of numbers. Whether scheduler, data and modules take their states only they
    can tell: they are given them first, on all ranks, and get back what they had where one
    refuses. Then parameters, buffers and the optimizer's state are filled in place. A save that is
    under way is waited for.

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
        background.finish()
        folder = finding.choose(asked, Path(directory), step)
        stored = finding.sound(asked, folder)
    except Exception as error:
        failure = error
    ways = ["call plait.checkpoint.load on all ranks: each reads its part"]
    told = arrive(mesh, asked, "plait.checkpoint.load", folder.name, failure, ways)
    assert stored is not None
    if len(set(told)) > 1:
        raise CheckpointError(
            asked, f"the ranks found different checkpoints: {', '.join(sorted(set(told)))}"
        )
    given = {"optimizer": optimizer, "scheduler": scheduler, "data": data}
    together(mesh, asked, lambda: finding.check_content(asked, folder, stored, place))
    ready = together(mesh, asked, lambda: prepare(asked, folder, stored, model, given, place))
    places = together(mesh, asked, lambda: _places(ready, given["optimizer"]))
    before = together(mesh, asked, lambda: undoing.remember(model, given))
    try:
        together(mesh, asked, lambda: _give(ready, model, given))
    except BaseException:
        undoing.put_back(before)
        raise
    _fill(mesh, asked, ready, given["optimizer"], places)
    return Loaded(stored.step, dict(ready.training["extra"]), folder)


def _places(ready: Ready, optimizer: Any) -> dict[str, Held]:
    """Where each stored tensor goes; all of them are found in the files. Changes nothing."""
    held, states = ready.model, dict[str, Held]()
    wanted = {MODEL + there: held.tensors[here] for here, there in ready.stored_name.items()}
    if optimizer is not None:
        record, names = ready.training["optimizer"], ready.name_here
        states = optimizers.places(optimizer, held, record, ready.stored.tensors, names)
    ChunkReader(ready.folder, ready.stored).items([*wanted.items(), *states.items()])
    return states


def _give(ready: Ready, model: nn.Module, given: Mapping[str, Any]) -> None:
    """What may still be refused: by the scheduler, the data, modules with a state of their own."""
    for name, value in ready.training["extra_state"].items():
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    if given["scheduler"] is not None:
        given["scheduler"].load_state_dict(ready.training["scheduler"])
    if given["data"] is not None:
        given["data"].load_state_dict(ready.own["data"])
    if ready.own["rng"] is not None:  # none where it came from the files of a model
        randomness.restore(ready.own["rng"])


def _fill(
    mesh: "DeviceMesh | None", asked: str, ready: Ready, optimizer: Any, states: dict[str, Held]
) -> None:
    """Changes the tensors of the model and of the optimizer."""
    failure: Exception | None = None
    try:
        held, names = ready.model, ready.name_here
        wanted = [(MODEL + there, held.tensors[here]) for here, there in ready.stored_name.items()]
        ChunkReader(ready.folder, ready.stored).fill([*wanted, *states.items()])
        if optimizer is not None:
            optimizers.restore(optimizer, held, ready.training["optimizer"], states, names)
    except Exception as error:
        failure = error
    settle(mesh, asked, failure)
