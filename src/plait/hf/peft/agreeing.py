"""Are all ranks about to put the same adapter on a split model?"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import RankError
from plait.run.around import split_module
from plait.state import ParallelState, own_class, state_of
from plait.weights.outcome import meet

_OF_THE_RANK = frozenset({"base_model_name_or_path", "revision", "auto_mapping"})
"""Fields of a config that may differ: where each rank has its files."""


def ranks_of(state: ParallelState) -> DeviceMesh:
    """The ranks that hold parts of one model, or copies of it."""
    return state.tp_mesh if state.data_mesh is None else state.mesh


def agree_on_config(config: Any, model: Any) -> None:
    """Compare the configs of an adapter.

    Args:
        config: This rank's.
        model: The split model.

    Raises:
        RankError: They differ; on all ranks. Nothing has been changed.

    Comm: one control message on each axis.
    """
    fields = {name: _words(x) for name, x in config.to_dict().items() if name not in _OF_THE_RANK}
    _compare(model, "config", fields)


def agree_on_weights(weights: Mapping[str, Any], model: Any) -> None:
    """Compare the weights of an adapter that is to be loaded.

    Args:
        weights: Name → whole tensor.
        model: The split model.

    Raises:
        RankError: They differ; on all ranks. Nothing has been loaded.

    Comm: one control message on each axis.
    """
    tensors = {name: x for name, x in weights.items() if type(x) is torch.Tensor and not x.is_meta}
    _compare(model, "weights", {name: _digest(x) for name, x in tensors.items()})


def _compare(model: Any, what: str, mine: Mapping[str, str]) -> None:
    state = state_of(model)
    if state is None:
        return
    mesh = ranks_of(state)
    asked = f"An adapter's {what} on a split {own_class(split_module(model)).__name__}:"
    told: list[Mapping[str, str]] = meet(mesh, f"adapter {what}", dict(mine), asked=asked)
    names = [
        name
        for name in dict.fromkeys(name for other in told for name in other)
        if len({other.get(name) for other in told}) > 1
    ]
    if names:
        ranks = mesh.mesh.flatten().tolist()
        problems = [
            f"rank {rank}: {name}={other.get(name)}"
            for name in names[:3]
            for rank, other in zip(ranks, told, strict=True)
        ]
        ways = "give the same on all ranks: they are parts of one whole"
        raise comm.mark_announced(RankError(asked, problems, ways))


def announced(call: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """A call in which a failure on one rank is told to those that wait for it."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        given = (instance, *args, *kwargs.values())
        for state in _states(given):
            comm.announce_failure(state.tp_mesh, error)
            if state.data_mesh is not None:
                comm.announce_failure(state.data_mesh, error)
        raise


def _states(given: Iterable[Any]) -> list[ParallelState]:
    models = [x for x in given if isinstance(x, torch.nn.Module)]
    found = [state_of(split_module(model)) for model in models]
    return [state for state in found if state is not None]


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr({str(key): _words(x) for key, x in sorted(value.items(), key=str)})
    if isinstance(value, set | frozenset):
        return repr(sorted(map(str, value)))
    return repr(value.value if isinstance(value, Enum) else value)


def _digest(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
    mine = hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
    return f"{tuple(x.shape)} {x.dtype} {mine}"
