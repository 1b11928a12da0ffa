"""Optimizer states as one process would have them, and back: a Trainer's `optimizer.pt`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait.errors import CheckpointError
from plait.state import ParallelState, pieces_of, whole_like


def whole_states(
    optimizer: Optimizer, model: nn.Module, state: ParallelState, *, keep: bool
) -> dict[str, Any]:
    """The `state_dict` that the optimizer of an unsplit model has.

    Args:
        optimizer: Over parameters of the model.
        model: The split model.
        state: How it was split.
        keep: Whether this rank wants it; the others only take part.

    Returns:
        The state; without tensors on ranks that do not keep it.

    Comm: one all-gather of each state of the form of its parameter. All ranks must call.
    """
    layouts = _layouts(model, state)
    given = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    whole: dict[int, dict[str, Any]] = {}
    for index in sorted(given["state"]):
        param, own = params[index], given["state"][index]
        made = {}
        for name in sorted(own):
            value = own[name]
            if isinstance(value, DTensor):
                value = whole_like(value, param, layouts.get(id(param)))
            if keep:
                made[name] = value.cpu() if isinstance(value, torch.Tensor) else value
        if keep:
            whole[index] = made
    return {"state": whole, "param_groups": given["param_groups"]}


def own_states(
    whole: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, state: ParallelState
) -> dict[str, Any]:
    """This rank's part of what `whole_states` gave, in any layout.

    Raises:
        CheckpointError: The number of parameters, or a shape, is another one.

    Comm: none.
    """
    layouts = _layouts(model, state)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    problems = []
    saved = sum(len(group["params"]) for group in whole["param_groups"])
    if saved != len(params):
        problems.append(f"it has states of {saved} parameters, the optimizer has {len(params)}")
    made: dict[int, dict[str, Any]] = {}
    for index, values in whole["state"].items() if not problems else ():
        param = params[index]
        made[index] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and isinstance(param, DTensor):
                if value.shape != param.shape:
                    there, here = tuple(value.shape), tuple(param.shape)
                    problems.append(f"{name} of parameter {index} is {there}, not {here}")
                    continue
                value = _own(value, param, layouts.get(id(param)))
            made[index][name] = value
    if problems:
        raise CheckpointError(
            "A Trainer's optimizer.pt:", problems, "resume with the model and optimizer it is of"
        )
    return {"state": made, "param_groups": whole["param_groups"]}


def _layouts(model: nn.Module, state: ParallelState) -> dict[int, Any]:
    names = model.named_parameters(remove_duplicate=False)
    return {id(param): state.layouts[name] for name, param in names if name in state.layouts}


def _own(value: torch.Tensor, param: DTensor, layout: Any) -> torch.Tensor:
    made = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
    local = made.to_local() if isinstance(made, DTensor) else made
    for piece in pieces_of(param, layout):
        box = value
        for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
            box = box.narrow(dim, start, size)
        piece.of(local).copy_(box)
    return made
