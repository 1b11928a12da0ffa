"""`load_state_dict` of a split module: each rank takes its part of whole tensors."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.plan.intervals import ParamLayout
from plait.state import LAYOUT, local_part
from plait.weights.sharded import fsdp_part, tp_rank
from plait.weights.slots import layout_of_tensor, placed_like

_MARK = "_plait_takes_whole"


def take_whole_tensors(part: nn.Module) -> None:
    """Let `load_state_dict` of a module, called on it or from above, take whole tensors.

    Names, shapes, `strict` and `assign` are judged by torch as for an ordinary module; every
    message names the parameter. Nothing is communicated: every rank must be given the same.
    """
    if _MARK not in part.__dict__:
        part.__dict__[_MARK] = True
        part.register_load_state_dict_pre_hook(_take)


def is_part(part: nn.Module) -> bool:
    """Whether a module was in the tree when it was split, or has been adopted since."""
    return _MARK in part.__dict__


def layout_of(name: str, param: torch.Tensor) -> ParamLayout:
    """How a parameter lies on the ranks: as recorded on it, else as it is placed."""
    layout: ParamLayout | None = param.__dict__.get(LAYOUT)
    return layout if layout is not None else layout_of_tensor(name, param)


def _take(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Exchange whole tensors in `state_dict`, a copy of the caller's, for this rank's parts."""
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    done: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        key = prefix + name
        given = state_dict.get(key)
        if not isinstance(param, DTensor) or not isinstance(given, torch.Tensor):
            continue
        if assign and id(param) in done:  # tied parameters stay tied
            state_dict[key] = done[id(param)]
            continue
        problem = _problem(given, param)
        if problem:
            error_msgs.append(f"{key}: {problem}")
            state_dict[key] = param
            continue
        if tuple(given.shape) != tuple(param.shape):
            continue  # torch's own message names it
        if isinstance(given, DTensor) and (not assign or isinstance(given, nn.Parameter)):
            if assign:  # torch puts this very object in place; the hook of a module above made it
                given.__dict__.update(param.__dict__)
            continue
        taken = _taken(given, param, layout_of(name, param))
        if assign:
            taken = nn.Parameter(taken, requires_grad=param.requires_grad)
            taken.__dict__.update(param.__dict__)
            done[id(param)] = taken
        state_dict[key] = taken


def _problem(given: torch.Tensor, param: DTensor) -> str | None:
    """What makes a tensor of the right whole shape no value of this parameter."""
    if isinstance(given, DTensor):
        same = given.device_mesh == param.device_mesh and given.placements == param.placements
        if given.shape == param.shape and (
            not same or given._local_tensor.shape != param._local_tensor.shape
        ):
            return (
                f"a DTensor placed as {tuple(given.placements)} on another layout than the "
                f"parameter's {tuple(param.placements)}; give the whole tensor"
            )
        return None
    local = tuple(param._local_tensor.shape)
    if tuple(given.shape) == local != tuple(param.shape):
        return (
            f"a plain tensor of shape {local}, which is one rank's part of {tuple(param.shape)}; "
            "give the whole tensor, or the DTensor that model.state_dict() has"
        )
    return None


def _taken(given: torch.Tensor, param: DTensor, layout: ParamLayout) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(given, DTensor):
            local = given._local_tensor
        else:
            local = local_part(given.detach(), layout, tp_rank(param))
            local = fsdp_part(local, param).contiguous()
        return placed_like(param, local)
