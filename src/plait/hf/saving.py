"""save_pretrained() of a split model: an ordinary checkpoint, gathered tensor by tensor."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import WeightsError
from plait.hf.conversion import revert, saved_names
from plait.hf.exporting import write_configs
from plait.hf.peft.saving import save_of_model
from plait.run import progress
from plait.state import ParallelState, state_of
from plait.styles.quantized import refuse_quantized
from plait.weights import ModuleStore, save, together
from plait.weights.outcome import ARRIVAL_S, arrive
from plait.weights.saving import byte_count
from plait.weights.sharded import is_first

_HUB = ("commit_message", "create_pr", "private", "repo_id", "token")
_IDLE = ("is_main_process", "save_peft_format")
_REFUSED = {
    "distributed_checkpoint": "save_pretrained writes an ordinary checkpoint, for any tp_size",
    "safe_serialization": "weights are written as safetensors only",
    "state_dict": "it would save something else than the split model's own tensors",
}
_HARMLESS = {"distributed_checkpoint": False, "safe_serialization": True, "state_dict": None}
_NAMED = ("max_shard_size", "push_to_hub", "save_original_format", "variant")


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    push_to_hub: bool = False,
    save_original_format: bool = True,
    **kwargs: Any,
) -> None:
    """Write an ordinary checkpoint that plain transformers reads; all ranks must call it.

    The first rank writes config, generation config and weights; the others take part in gathering.
    Tied weights are written once, renamed or fused ones in the layout of the file they came from.

    Args:
        model: The split model (bound: `model.save_pretrained(directory)`).
        save_directory: Where to; made if it is not there.
        max_shard_size: Largest weight file, in bytes or as in `"5GB"`.
        variant: Middle part of the weight files' names.
        push_to_hub: Upload the directory afterwards, from the first rank.
        save_original_format: False: the model's own names and layouts.
        **kwargs: `repo_id`, `token`, `commit_message`, `create_pr`, `private` for the upload.
            `is_main_process` is accepted and decides nothing: the first rank writes. Of a model
            that adapters were added to, the active adapter is saved, in PEFT's format.

    Raises:
        WeightsError: The directory cannot be written, or an argument is unknown or asks for
            something else than the whole model's own tensors. The directory is as it was.
        RankError: Another rank failed, or did not call it within `ARRIVAL_S` seconds (between
            GPUs and hosts: within the process group's time limit).

    Comm:
        One all-gather of each split tensor; control messages before each.
    """
    state = state_of(model)
    assert state is not None  # bound by parallelize
    if getattr(model, "_hf_peft_config_loaded", False) and kwargs.get("save_peft_format", True):
        save_of_model(model, save_directory)
        return
    asked = f"save_pretrained({os.fspath(save_directory)!r}):"
    given = {"save_directory": save_directory, "max_shard_size": max_shard_size, **kwargs}
    _meet(state, asked, _refusal(model, asked, given))
    if _writes_here(state):
        directory = Path(save_directory)
        _save(model, state, directory, max_shard_size, variant, save_original_format)
        together(_together(state), asked, lambda: _save_configs(model, state, directory))
        if push_to_hub:
            together(_together(state), asked, lambda: _push(state, directory, kwargs))
    _wait_for_writer(state)


def _refusal(model: Any, asked: str, kwargs: Mapping[str, Any]) -> WeightsError | None:
    """The error that arguments are, if any; all of them are named."""
    problems = []
    try:
        refuse_quantized(model, asked, "save the model as it is before it is quantized")
    except WeightsError as error:
        return error
    for name, value in kwargs.items():
        if name == "save_directory":
            if not os.fspath(value):
                problems.append("no directory is named")
        elif name == "max_shard_size":
            try:
                byte_count(value)
            except WeightsError as error:
                problems.append(f"max_shard_size={value!r}: {error.problems[0]} such as '5GB'")
        elif name in _REFUSED:
            if value is not None and value is not _HARMLESS[name]:
                problems.append(f"{name}: {_REFUSED[name]}")
        elif name not in (*_HUB, *_IDLE):
            near = difflib.get_close_matches(name, [*_HUB, *_IDLE, *_NAMED, *_REFUSED], 3)
            hint = f" (closest: {', '.join(near)})" if near else ""
            problems.append(f"there is no argument {name}{hint}")
    if getattr(model, "_hf_peft_config_loaded", False):
        problems.append("save_peft_format=False: adapters are saved in PEFT's format")
    ways = ["leave out what is named: the whole model's tensors are gathered from the ranks"]
    return WeightsError(asked, problems, ways) if problems else None


def _meet(state: ParallelState, asked: str, refusal: WeightsError | None) -> None:
    """Wait for all ranks, but not for long, and end on all of them where one refuses."""
    ways = ["call save_pretrained on all ranks: each gives its slices, the first one writes"]
    arrive(
        _together(state),
        asked,
        "save_pretrained",
        failure=refusal,
        ways_out=ways,
        seconds=ARRIVAL_S,
    )


def _save(
    model: Any,
    state: ParallelState,
    directory: Path,
    max_shard_size: int | str,
    variant: str | None,
    original: bool,
) -> None:
    names = saved_names(model)
    store = ModuleStore(model, state.layouts, state.tp_mesh, names, world=_together(state))
    recipes = revert(model, names, store, None if original else [])
    report = save(store, recipes, directory, max_shard_size=max_shard_size, variant=variant)
    progress.report(f"{directory.name}: {report}")


def _save_configs(model: Any, state: ParallelState, directory: Path) -> None:
    if is_first(_together(state)):
        write_configs(model, directory)


def _push(state: ParallelState, directory: Path, kwargs: dict[str, Any]) -> None:
    if not is_first(_together(state)):
        return
    from huggingface_hub import HfApi

    api = HfApi(token=kwargs.get("token"))
    name = kwargs.get("repo_id") or directory.name
    repo = api.create_repo(name, exist_ok=True, private=kwargs.get("private"))
    api.upload_folder(
        repo_id=repo.repo_id,
        folder_path=directory,
        commit_message=kwargs.get("commit_message") or "Upload model",
        create_pr=bool(kwargs.get("create_pr")),
    )


def _together(state: ParallelState) -> DeviceMesh:
    """The ranks that save together: all that hold a part of the first copy, or of any copy."""
    return state.tp_mesh if state.data_mesh is None else state.mesh


def _writes_here(state: ParallelState) -> bool:
    """Whether this rank takes part: sharded over data ranks all do, of replicas the first."""
    if state.data_mesh is not None:
        return True
    names = state.mesh.mesh_dim_names or ()
    others = [name for name in names if name != "tp"] if state.mesh.ndim > 1 else []
    return all(state.mesh.get_local_rank(name) == 0 for name in others)


def _wait_for_writer(state: ParallelState) -> None:
    """Return on no replica before the files are there."""
    if state.mesh.ndim > 1 and state.data_mesh is None:
        for name in state.mesh.mesh_dim_names or ():
            if name != "tp":
                comm.exchange(None, state.mesh[name])
