"""Adapters of a split model as PEFT's ordinary files: gathered from all ranks, written by one."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.errors import WeightsError
from plait.hf.peft.agreeing import ranks_of
from plait.hf.peft.on_parts import in_chunks, whole_value
from plait.run.around import split_module
from plait.state import own_class, state_of
from plait.weights.outcome import ARRIVAL_S, arrive, together
from plait.weights.sharded import is_first

_READY = "_plait_adapter_states"  # on a PEFT model while its files are written: adapter → state


def whole_state(call: Callable[..., Any], model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`get_peft_model_state_dict` of a split model: PEFT chooses the names, plait gathers.

    Args:
        call: PEFT's own.
        model: The split model, or PEFT's around it.
        given: Its arguments beside model and state.

    Comm:
        One all-gather of each split tensor that is chosen, on each axis. All ranks must call it.
    """
    ready: dict[str, Any] = model.__dict__.get(_READY, {})
    adapter = given.get("adapter_name", "default")
    if adapter in ready:
        return dict(ready[adapter])
    in_chunks(split_module(model))
    held = model.state_dict(keep_vars=True)
    shown = {name: _shown(x) for name, x in held.items()}
    names = {id(x): name for name, x in shown.items()}
    with _as_unsplit(split_module(model)):
        chosen = call(model, state_dict=shown, **given)
    return {key: _value(held[names[id(x)]]) if id(x) in names else x for key, x in chosen.items()}


@contextlib.contextmanager
def _as_unsplit(model: nn.Module) -> Iterator[None]:
    """Inside, PEFT takes the model for one that is not split, and gathers nothing by itself."""
    size = model.__dict__.pop("_tp_size", None)
    try:
        yield
    finally:
        model.__dict__["_tp_size"] = size


def _shown(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if _is_tensor(x) else x


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _value(x: Any) -> Any:
    if not _is_tensor(x):
        return x
    whole = whole_value(x) if isinstance(x, DTensor) else x
    return whole.detach().cpu().clone()


def save_adapters(
    call: Callable[..., Any], model: Any, save_directory: Any, kwargs: dict[str, Any]
) -> None:
    """`PeftModel.save_pretrained` of a split model; all ranks must call it.

    Args:
        call: PEFT's own.
        model: Its model around a split one.
        save_directory: Where to.
        kwargs: Its other arguments. `is_main_process` decides nothing: the first rank writes.

    Raises:
        WeightsError: The directory is a file, an adapter is unknown, or an argument needs the
            whole model in one process. Nothing has been written.
        RankError: Another rank failed, or does not save.

    Comm:
        One all-gather of each split tensor; control messages.
    """
    from peft import get_peft_model_state_dict

    state = state_of(model)
    assert state is not None
    mesh, asked = ranks_of(state), f"save_pretrained({os.fspath(save_directory)!r}) of adapters:"
    chosen = kwargs.get("selected_adapters") or list(model.peft_config)
    _meet(mesh, asked, _refusal(model, asked, save_directory, chosen, kwargs))
    layers = kwargs.get("save_embedding_layers", "auto")
    ready = {
        name: get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=layers)
        for name in chosen
    }

    def write() -> None:
        if is_first(mesh):
            with _prepared(model, ready):
                call(save_directory, **{**kwargs, "is_main_process": True})

    together(mesh, asked, write)


@contextlib.contextmanager
def _prepared(model: Any, ready: dict[str, Any]) -> Iterator[None]:
    model.__dict__[_READY] = ready
    # Into adapter_config.json goes the class as its author wrote it, not the one that FSDP made.
    base = own_class(split_module(model))
    model.__dict__["_get_base_model_class"] = lambda *_, **__: base
    try:
        yield
    finally:
        del model.__dict__[_READY], model.__dict__["_get_base_model_class"]


def save_of_model(model: Any, save_directory: Any) -> None:
    """The active adapter of a model of transformers that adapters were added to, as PEFT's files.

    Comm: as `save_adapters`.
    """
    from peft import get_peft_model_state_dict

    state = state_of(model)
    assert state is not None
    mesh, asked = ranks_of(state), f"save_pretrained({os.fspath(save_directory)!r}) of adapters:"
    active = model.active_adapters()
    several = WeightsError(
        asked,
        f"several adapters are active: {', '.join(active)}",
        "model.set_adapter(name), and save one after the other",
    )
    failure = several if len(active) > 1 else _directory_refusal(asked, save_directory)
    _meet(mesh, asked, failure)
    found = get_peft_model_state_dict(model, adapter_name=active[0])

    def write() -> None:
        if not is_first(mesh):
            return
        from safetensors.torch import save_file

        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        prefixed = {f"base_model.model.{name}": x.contiguous() for name, x in found.items()}
        save_file(prefixed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[active[0]].save_pretrained(directory)

    together(mesh, asked, write)


def _meet(mesh: DeviceMesh, asked: str, failure: WeightsError | None) -> None:
    ways = ["call save_pretrained on all ranks: each gives its parts, the first one writes"]
    arrive(mesh, asked, "save adapters", failure=failure, ways_out=ways, seconds=ARRIVAL_S)


def _refusal(
    model: Any, asked: str, directory: Any, chosen: list[str], kwargs: dict[str, Any]
) -> WeightsError | None:
    refusal = _directory_refusal(asked, directory)
    problems = list(refusal.problems) if refusal is not None else []
    known = list(model.peft_config)
    problems += [
        f"there is no adapter {name!r}; there are {', '.join(known)}"
        for name in chosen
        if name not in known
    ]
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        problems.append(
            "path_initial_model_for_weight_conversion compares with a second adapter in the model"
        )
    if kwargs.get("state_dict") is not None:
        problems.append("state_dict: it would save something else than the model's own adapters")
    return WeightsError(asked, problems, "leave out what is named") if problems else None


def _directory_refusal(asked: str, directory: Any) -> WeightsError | None:
    if os.path.isfile(directory):
        return WeightsError(asked, "it is a file", "name a directory")
    return None


def is_split(model: Any) -> bool:
    """Whether a model, or the one inside a model of PEFT, is split."""
    return isinstance(model, nn.Module) and state_of(split_module(model)) is not None
