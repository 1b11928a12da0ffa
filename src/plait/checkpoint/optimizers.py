"""An optimizer's state by the names of the parameters, for any layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plait.checkpoint.held import Held, HeldModel, local_of
from plait.checkpoint.manifest import OPTIMIZER, StoredTensor
from plait.weights.slots import placed_like

_OWN = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how an optimizer computes, not what: those of the running one are kept."""


@dataclass(frozen=True)
class HeldOptimizer:
    """What an optimizer remembers.

    Attributes:
        tensors: States that lie as their parameter does, by their keys in the checkpoint.
        record: The rest: the class, the groups with their settings and the names of their
            parameters, and for each parameter the single numbers and which tensors it has.
    """

    tensors: Mapping[str, Held]
    record: Mapping[str, Any]


def held_optimizer(optimizer: Any, model: HeldModel) -> tuple[HeldOptimizer, list[str]]:
    """What this rank holds of an optimizer's state, and what keeps it from being stored."""
    problems = []
    tensors: dict[str, Held] = {}
    states: dict[str, dict[str, Any]] = {}
    groups, unknown = _groups(optimizer, model)
    if unknown:
        problems.append(
            f"{unknown} parameters of the optimizer are not the model's: was it made before the "
            "model was split?"
        )
    for name, param in model.params.items():
        state = optimizer.state.get(param)
        if not state:
            continue
        numbers: dict[str, Any] = {}
        stored: list[str] = []
        for key, value in state.items():
            kind = _kind(key, value, param)
            if kind == "as the parameter":
                held = model.tensors[name]
                tensors[_key(name, key)] = Held(name, held.shape, local_of(value), held.pieces)
                stored.append(key)
            elif kind == "number":
                numbers[key] = local_of(value).cpu().clone() if torch.is_tensor(value) else value
            else:
                problems.append(
                    f"the optimizer's {key!r} of {name} has shape {tuple(value.shape)}, the "
                    f"parameter {model.tensors[name].shape}: how it lies on the ranks is not known"
                )
        states[name] = {"numbers": numbers, "tensors": stored}
    record = {"class": type(optimizer).__name__, "groups": groups, "states": states}
    return HeldOptimizer(tensors, record), problems


def mismatch(
    optimizer: Any,
    model: HeldModel,
    record: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    name_here: Mapping[str, str],
) -> list[str]:
    """What keeps a stored state from going into an optimizer.

    Args:
        optimizer: The optimizer.
        model: The model that it is for.
        record: As in `HeldOptimizer`.
        stored: The tensors of the checkpoint.
        name_here: The stored parameters' names → those in this model.
    """
    if record["class"] != type(optimizer).__name__:
        return [f"the optimizer is {type(optimizer).__name__}, the stored one {record['class']}"]
    groups, unknown = _groups(optimizer, model)
    problems = []
    if unknown:
        problems.append(f"{unknown} parameters of the optimizer are not the model's")
    for name, state in record["states"].items():
        here = name_here.get(name, name)
        if here not in model.params:
            problems.append(f"the optimizer's state of {name} is for no parameter of the model")
            continue
        problems += _misfits(name, state["tensors"], stored, model.tensors[here].shape)
    if len(groups) != len(record["groups"]):
        problems.append(
            f"the optimizer has {len(groups)} groups of parameters, "
            f"the stored one {len(record['groups'])}"
        )
        return problems
    for i, (here, there) in enumerate(zip(groups, record["groups"], strict=True)):
        ours = set(here["params"])
        theirs = {name_here.get(name, name) for name in there["params"]}
        for which, names in (("not stored", ours - theirs), ("only stored", theirs - ours)):
            problems += [f"optimizer group {i}: {name} is {which}" for name in sorted(names)]
    return problems


def _misfits(
    name: str, keys: list[str], stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> list[str]:
    problems = []
    for key in keys:
        tensor = stored.get(_key(name, key))
        if tensor is None:
            problems.append(f"the optimizer's {key!r} of {name} is missing in it")
        elif tensor.shape != shape:
            problems.append(
                f"the optimizer's {key!r} of {name}: shape {tensor.shape} in it, {shape} here"
            )
    return problems


def places(
    optimizer: Any,
    model: HeldModel,
    record: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    name_here: Mapping[str, str],
) -> dict[str, Held]:
    """Where the stored states go, by their keys: the optimizer's own tensors where they fit.

    New ones are made where it has none; `restore` puts them in.
    """
    wanted = {}
    for there, state in record["states"].items():
        name = name_here.get(there, there)
        param, held = model.params[name], model.tensors[name]
        for key in state["tensors"]:
            dtype = stored[_key(there, key)].dtype
            old = optimizer.state.get(param, {}).get(key)
            fits = torch.is_tensor(old) and old.dtype == dtype
            fits = fits and local_of(old).shape == held.local.shape
            local = local_of(old) if fits else torch.empty_like(held.local, dtype=dtype)
            wanted[_key(there, key)] = Held(name, held.shape, local, held.pieces)
    return wanted


def restore(
    optimizer: Any,
    model: HeldModel,
    record: Mapping[str, Any],
    filled: Mapping[str, Held],
    name_here: Mapping[str, str],
) -> None:
    """Gives an optimizer the stored state: settings of the groups, tensors, numbers."""
    for group, there in zip(optimizer.param_groups, record["groups"], strict=True):
        group.update({k: v for k, v in there["settings"].items() if k not in _OWN})
    states = {name_here.get(name, name): (name, s) for name, s in record["states"].items()}
    on_device = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    for name, param in model.params.items():
        if name not in states:
            optimizer.state.pop(param, None)  # as it was: a parameter without a step
            continue
        there, state = states[name]
        values = {}
        for key in state["tensors"]:
            local = filled[_key(there, key)].local
            if key == "step":  # earlier versions stored that of a single number as a tensor
                values[key] = local.clone() if id(param) in on_device else local.cpu().clone()
                continue
            values[key] = placed_like(param, local) if isinstance(param, DTensor) else local
        for key, value in state["numbers"].items():
            tensor = torch.is_tensor(value)
            device = model.tensors[name].local.device if id(param) in on_device else "cpu"
            values[key] = value.to(device).clone() if tensor else value
        optimizer.state[param] = values


def _groups(optimizer: Any, model: HeldModel) -> tuple[list[dict[str, Any]], int]:
    """The groups with names for parameters, and how many parameters the model does not have."""
    names = {id(param): name for name, param in model.params.items()}
    groups, unknown = [], 0
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        unknown += sum(id(p) not in names for p in group["params"])
        params = [names[id(p)] for p in group["params"] if id(p) in names]
        groups.append({"params": params, "settings": settings})
    return groups, unknown


def _kind(key: str, value: Any, param: torch.Tensor) -> str:
    if not torch.is_tensor(value):
        return "number"
    if param.ndim == 0 and value.ndim == 0 and _counts(key, value, param):
        return "number"
    if local_of(value).shape == local_of(param).shape and value.ndim == param.ndim:
        return "as the parameter"
    return "number" if value.numel() == 1 else "unknown"


def _counts(key: str, value: Any, param: torch.Tensor) -> bool:
    """Whether a state of a parameter without a dimension is a number, and not one like it."""
    return key == "step" or (isinstance(param, DTensor) and not isinstance(value, DTensor))


def _key(name: str, key: str) -> str:
    return f"{OPTIMIZER}{name}.{key}"


def keys_of(record: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the tensors that a record speaks of."""
    for name, state in record["states"].items():
        for key in state["tensors"]:
            yield _key(name, key)
