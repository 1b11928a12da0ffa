"""Modules that PEFT trains whole beside adapters (`modules_to_save`), copies of split ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from plait.hf.peft.styles import refused
from plait.state import LAYOUT, ParallelState, own_class
from plait.styles import TensorParallelLayer
from plait.styles.params import set_param
from plait.styles.sequence_params import follow_copied
from plait.surgery.data_ranks import spread_over_data, without_chunks
from plait.surgery.loading import layout_of
from plait.weights.sharded import fsdp_shards

_RECORDS = "__composable_api"
"""How the attributes begin under which torch keeps what `fully_shard` knows of a module."""


class SavedModules:
    """What plait knows of the wrapper that holds a module and copies of it that are trained."""

    def inner(self, part: nn.Module) -> str | None:
        """`original_module`, for a wrapper of PEFT."""
        from peft.utils.other import AuxiliaryTrainingWrapper

        return "original_module" if isinstance(part, AuxiliaryTrainingWrapper) else None

    def styles(
        self, part: Any, name: str, state: ParallelState
    ) -> Mapping[str, TensorParallelLayer]:
        """None: a copy is split as the module is."""
        from peft.utils.other import ModulesToSaveWrapper

        if not isinstance(part, ModulesToSaveWrapper):
            raise refused(part, name, "single tokens are trained of whole embeddings only")
        return {}

    def finish(self, part: Any, root: nn.Module, state: ParallelState) -> None:
        """Note how the copies' parameters lie, and hold them whole on every data rank."""
        original = dict(part.original_module.named_modules())
        for copied in part.modules_to_save.values():
            for name, module in copied.named_modules():
                follow_copied(original[name], module)
                for key, param in list(module._parameters.items()):
                    if not isinstance(param, DTensor):
                        continue
                    if LAYOUT not in param.__dict__ or fsdp_shards(param) is not None:
                        first = original[name]._parameters[key]
                        assert first is not None
                        _settle(module, key, layout_of(key, first), state)


def _settle(module: nn.Module, name: str, layout: Any, state: ParallelState) -> None:
    param: Any = module._parameters[name]
    if fsdp_shards(param) is not None:
        with torch.no_grad():
            whole = without_chunks(param, layout)
            axis = state.tp_mesh
            found = dict(_placed(param))
            placed = [found["tp"] if state.tp_size > 1 else Replicate()]
            on_tp = DTensor.from_local(
                whole, axis, placed, run_check=False, shape=param.shape, stride=param.stride()
            )
        set_param(module, name, on_tp, like=param)
        spread_over_data(module, name, state)
    now = module._parameters[name]
    assert now is not None
    now.__dict__[LAYOUT] = layout


def _placed(param: DTensor) -> list[tuple[str, Any]]:
    names = param.device_mesh.mesh_dim_names or ()
    return list(zip(names, param.placements, strict=False))


@contextmanager
def copyable(root: nn.Module) -> Iterator[None]:
    """Inside, modules that FSDP shards can be copied; a copy knows nothing of FSDP."""
    parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.__dict__["__deepcopy__"] = MethodType(_copied, part)
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["__deepcopy__"]


def _copied(self: Any, memo: dict[int, Any]) -> nn.Module:
    """A copy without FSDP: of the module's own class, with its other hooks."""
    kind, attributes = type(self), dict(self.__dict__)
    try:
        self.__class__ = own_class(self)
        del self.__dict__["__deepcopy__"]
        for name, hooks in attributes.items():
            if name.startswith(_RECORDS):
                del self.__dict__[name]
            elif name.endswith("hooks") and isinstance(hooks, dict):
                others = [(key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook)]
                self.__dict__[name] = type(hooks)(others)
        copied: nn.Module = deepcopy(self, memo)
    finally:
        self.__class__ = kind
        self.__dict__.update(attributes)
    return copied


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps some of them
    function = getattr(function, "func", function)
    owner = getattr(function, "__self__", None)
    names = (getattr(function, "__module__", ""), type(owner).__module__)
    return any(str(name).startswith("torch.distributed") for name in names)
