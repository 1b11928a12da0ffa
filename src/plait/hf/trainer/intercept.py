"""Where the Trainer is told that a model is split; nothing changes for models that are not."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from plait.hf.trainer import sft
from plait.hf.trainer.training import SplitTrainer
from plait.state import ParallelState, state_of

_MODULE = "transformers.trainer"
_done = False
_classes: dict[type, type] = {}


def expect_trainer() -> None:
    """Let transformers' Trainer, once it is imported, take split models; once for the process.

    Comm: none.
    """
    global _done
    if _done or importlib.util.find_spec("wrapt") is None:
        return
    _done = True
    for name, install in ((_MODULE, _install), (sft.MODULE, sft.install)):
        if name in sys.modules:
            install(sys.modules[name])
        else:
            import wrapt

            wrapt.register_post_import_hook(install, name)


def split_part(model: Any) -> tuple[nn.Module, ParallelState] | None:
    """The split model, which adapters may be around, and how it was split; None if none is."""
    if not isinstance(model, nn.Module):
        return None
    for part in model.modules():
        state = state_of(part)
        if state is not None:
            return part, state
    return None


def _install(module: Any) -> None:
    from wrapt import wrap_function_wrapper

    wrap_function_wrapper(module.Trainer, "__init__", _init)


def _init(call: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> None:
    model = args[0] if args else kwargs.get("model")
    found = split_part(model)
    if found is not None:
        kind = type(trainer)
        sft.check_trl(kind)
        if not issubclass(kind, SplitTrainer):
            if kind not in _classes:
                _classes[kind] = type(kind.__name__, (SplitTrainer, kind), {})
            trainer.__class__ = _classes[kind]
        trainer._plait_begin(*found)
    call(*args, **kwargs)
    if found is not None:
        trainer._plait_is_made = True
