"""Where PEFT is told that a model is split; nothing changes for models that are not."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from plait.state import state_of
from plait.surgery import adopt
from plait.surgery.loading import is_part
from plait.surgery.wrappers import KNOWN

_WHOLE = ("pissa", "olora", "corda", "loftq", "mica", "orthogonal", "lora_ga", "eva")
"""Initial values that PEFT computes from the layer's weight, and changes the weight by."""

_done = False


def expect_peft() -> None:
    """Let PEFT, when it is imported or if it has been, work on split models; once for the process.

    Comm: none.
    """
    global _done
    if _done:
        return
    _done = True
    if "peft" in sys.modules:
        _install(sys.modules["peft"])
    elif importlib.util.find_spec("peft") is not None:
        import wrapt

        wrapt.register_post_import_hook(_install, "peft")


def _install(peft: Any) -> None:
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.lora.model import LoraModel
    from peft.tuners.tuners_utils import BaseTuner
    from wrapt import wrap_function_wrapper

    from plait.hf.peft.layers import Adapters
    from plait.hf.peft.saved_modules import SavedModules

    KNOWN.extend([Adapters(), SavedModules()])
    wrap_function_wrapper(BaseTuner, "inject_adapter", _inject)
    wrap_function_wrapper(LoraModel, "_create_and_replace", _create)
    wrap_function_wrapper(LoraLayer, "_get_in_out_features", _features)
    wrap_function_wrapper(peft.PeftModel, "__init__", _make)
    wrap_function_wrapper(peft.PeftModel, "save_pretrained", _save)


def _inject(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    from plait.hf.peft.on_parts import in_chunks
    from plait.hf.peft.saved_modules import copyable

    model = args[0] if args else kwargs["model"]
    if state_of(model) is None:
        return call(*args, **kwargs)
    in_chunks(model)
    with copyable(model):
        found = call(*args, **kwargs)
    adopt(model)
    return found


def _create(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    """Make one layer of LoRA; with the whole weight where it is made of that."""
    from plait.hf.peft.on_parts import whole_weights

    config, _, target = args[:3]
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    start = getattr(config, "init_lora_weights", True)
    is_made = config.use_dora or (isinstance(start, str) and start.lower().startswith(_WHOLE))
    with ExitStack() as stack:
        if is_made and state_of(tuner.model) is not None:
            stack.enter_context(whole_weights(base))
        return call(*args, **kwargs)


def _features(call: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """The features of the whole layer: PEFT would take those of a rank's part."""
    base = args[0] if args else kwargs["module"]
    into, out = getattr(base, "in_features", None), getattr(base, "out_features", None)
    if is_part(base) and isinstance(into, int) and isinstance(out, int):
        return into, out
    return call(*args, **kwargs)


def _make(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> None:
    call(*args, **kwargs)


def _save(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)
