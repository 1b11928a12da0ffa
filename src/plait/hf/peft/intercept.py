"""Where PEFT is told that a model is split; nothing changes for models that are not."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from plait.errors import PlaitError
from plait.hf.peft import prompts
from plait.hf.peft.agreeing import agree_on_config, agree_on_weights, announced
from plait.hf.peft.on_parts import in_chunks, is_sharded_root
from plait.hf.peft.saving import is_split, save_adapters, whole_state
from plait.run.around import split_module, stand_around
from plait.state import own_class, state_of
from plait.surgery import adopt
from plait.surgery.adopting import settle_adapters
from plait.surgery.loading import is_part
from plait.surgery.wrappers import KNOWN, look

_WHOLE = ("pissa", "olora", "corda", "loftq", "mica", "orthogonal", "lora_ga")
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
    from peft.utils import save_and_load
    from wrapt import wrap_function_wrapper

    from plait.hf.peft.layers import Adapters
    from plait.hf.peft.saved_modules import SavedModules

    KNOWN.extend([Adapters(), SavedModules()])
    wrap_function_wrapper(BaseTuner, "inject_adapter", _inject)
    wrap_function_wrapper(BaseTuner, "disable_adapter_layers", _disable)
    wrap_function_wrapper(BaseTuner, "_cast_adapter_dtype", _cast)
    wrap_function_wrapper(LoraModel, "_create_and_replace", _create)
    wrap_function_wrapper(LoraModel, "add_weighted_adapter", _refuse)
    wrap_function_wrapper(LoraLayer, "_get_in_out_features", _features)
    wrap_function_wrapper(peft.PeftModel, "__init__", _make)
    wrap_function_wrapper(peft.PeftModel, "save_pretrained", _save)
    wrap_function_wrapper(peft.PeftModel, "from_pretrained", announced)
    wrap_function_wrapper(peft.PeftModel, "load_adapter", announced)
    wrap_function_wrapper(peft.PeftModel, "_setup_prompt_encoder", prompts.set_up)
    wrap_function_wrapper(peft.PeftModel, "get_prompt", prompts.get_prompt)
    for name, wrapper in _FUNCTIONS.items():
        _wrap_everywhere(getattr(save_and_load, name), wrapper)


def _wrap_everywhere(function: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Exchange a function in every module that has imported it by name."""
    from wrapt import FunctionWrapper

    name, wrapped = function.__name__, FunctionWrapper(function, wrapper)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            module.__dict__[name] = wrapped


def _inject(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    from plait.hf.peft.saved_modules import copyable

    model = args[0] if args else kwargs["model"]
    if state_of(model) is None:
        return call(*args, **kwargs)
    for config in tuner.peft_config.values():
        agree_on_config(config, model)
        refuse_config(config, model)
    in_chunks(model)
    before = {id(part) for part, _ in look(model).parts.values()}
    had_config = hasattr(model, "peft_config")
    try:
        with copyable(model):
            found = call(*args, **kwargs)
        adopt(model)
    except Exception:
        _take_out(model, before)
        if not had_config and hasattr(model, "peft_config"):
            del model.peft_config
        raise
    return found


def _take_out(model: Any, before: set[int]) -> None:
    """Put the layers back that new adapters were put around."""
    for name, (part, wrapper) in look(model).parts.items():
        if id(part) in before:
            continue
        owner, _, leaf = name.rpartition(".")
        attribute = wrapper.inner(part)
        if attribute is not None:
            model.get_submodule(owner)._modules[leaf] = getattr(part, attribute)


def _create(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    """Make one layer of LoRA; with the whole weight where it is made of that."""
    from plait.hf.peft.on_parts import whole_weights

    config, _, target = args[:3]
    state = state_of(tuner.model)
    if state is None:
        return call(*args, **kwargs)
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    start = getattr(config, "init_lora_weights", True)
    is_made = isinstance(start, str) and start.lower().startswith(_WHOLE)
    axes = [state.tp_mesh, *([state.data_mesh] if state.data_mesh is not None else [])]
    with ExitStack() as stack:
        if is_made or config.use_dora:
            stack.enter_context(whole_weights(base, axes if is_made else ()))
        return call(*args, **kwargs)


_KINDS = ("LORA", "IA3", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
_VARIANTS = (
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "use_bdlora",
    "layer_replication",
    "trainable_token_indices",
)


def _refuse_variants(config: Any, model: Any) -> None:
    """Refuse variants of LoRA that look at more of a layer than its output.

    Raises:
        PlaitError: The config asks for one.
    """
    asked = [name for name in _VARIANTS if getattr(config, name, None)]
    start = getattr(config, "init_lora_weights", True)
    asked += ["init_lora_weights='eva'"] if start == "eva" else []
    if asked:
        raise PlaitError(
            f"LoRA with {', '.join(asked)} on a split {own_class(model).__name__}:",
            "this variant computes with whole weights, of which each rank holds a part",
            ["LoRA, rsLoRA, DoRA, PiSSA and OLoRA work", "train it in one process"],
        )


def refuse_config(config: Any, model: Any) -> None:
    """Refuse what a split model cannot have, before anything of the model is changed.

    Raises:
        PlaitError: The config asks for another kind of adapter, a variant that computes with whole
            weights, or ties between adapters of a tied embedding and head.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind not in _KINDS:
        raise PlaitError(
            f"Adapters of the kind {kind} on a split {own_class(model).__name__}:",
            f"kinds that work on the parts of layers are {', '.join(_KINDS)}",
            ["one of these", "train it in one process"],
        )
    _refuse_variants(config, model)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and getattr(config, "ensure_weight_tying", False):
        raise PlaitError(
            f"ensure_weight_tying=True with the tied weights of {own_class(model).__name__}:",
            "adapters of a split embedding and of its head are cut each in its way, and not tied",
            ["leave ensure_weight_tying out", "train it in one process"],
        )


def _features(call: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """The features of the whole layer: PEFT would take those of a rank's part."""
    base = args[0] if args else kwargs["module"]
    into, out = getattr(base, "in_features", None), getattr(base, "out_features", None)
    if is_part(base) and isinstance(into, int) and isinstance(out, int):
        return into, out
    return call(*args, **kwargs)


def _disable(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    """Disabled adapters that are merged are taken out now, and not by a forward.

    In a forward FSDP has gathered the weights, and would forget what is done to them.
    """
    if is_sharded_root(tuner.model):
        for part in tuner.model.modules():
            layer: Any = part
            if getattr(layer, "merged_adapters", None) and hasattr(layer, "base_layer"):
                layer.unmerge()
    return call(*args, **kwargs)


def _refuse(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> Any:
    if state_of(tuner.model) is None:
        return call(*args, **kwargs)
    raise PlaitError(
        f"add_weighted_adapter of a split {own_class(tuner.model).__name__}:",
        "it computes new factors from whole ones, and no rank holds these",
        "combine them in one process, save the result, and load it",
    )


def _make(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> None:
    given = dict(zip(("model", "peft_config"), args, strict=False)) | kwargs
    if state_of(given["model"]) is not None:
        agree_on_config(given["peft_config"], given["model"])
        refuse_config(given["peft_config"], given["model"])
    call(*args, **kwargs)
    note_inside(peft_model)


def note_inside(peft_model: Any) -> None:
    """Let a model of PEFT speak for the split one inside, if it is split."""
    inner = peft_model.get_base_model()
    if state_of(inner) is None:
        return
    if peft_model.base_model is inner:  # learned prompts
        stand_around(peft_model, "base_model")
    else:
        stand_around(peft_model, "base_model.model")
        stand_around(peft_model.base_model, "model")


def _save(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> Any:
    if not is_split(peft_model):
        return call(*args, **kwargs)
    names = ("save_directory", "safe_serialization", "selected_adapters")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    save_adapters(call, peft_model, given.pop("save_directory"), given)
    return None


def _whole_state(call: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("model", "state_dict", "adapter_name"), args, strict=False)) | kwargs
    model = given.pop("model")
    if not is_split(model) or given.get("state_dict") is not None:
        return call(*args, **kwargs)
    given.pop("state_dict", None)
    return whole_state(call, model, given)


def _as_they_are(call: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """PEFT would cut whole tensors evenly; `load_state_dict` of a split model takes them whole."""
    return args[1] if is_split(args[0]) else call(*args, **kwargs)


def _cast(call: Callable[..., Any], tuner: Any, args: Any, kwargs: Any) -> None:
    """What is noted on a factor is noted on the one in float32 that PEFT puts in its place."""
    model = tuner.model
    before = dict(model.named_parameters()) if state_of(model) is not None else {}
    call(*args, **kwargs)
    if _carry_notes(before, model):
        settle_adapters(model)


def _carry_notes(before: dict[str, Any], model: Any) -> bool:
    """Note on new parameters what was noted on those whose places they took; whether there are."""
    now = dict(model.named_parameters()) if before else {}
    pairs = [(old, now[name]) for name, old in before.items() if now.get(name, old) is not old]
    for old, new in pairs:
        notes = {key: x for key, x in old.__dict__.items() if key.startswith("_plait")}
        new.__dict__.update(notes)
    return bool(pairs)


def _loaded(call: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("model", "peft_model_state_dict"), args, strict=False)) | kwargs
    model = given["model"]
    if is_split(model):
        agree_on_weights(given["peft_model_state_dict"], split_module(model))
    found = call(*args, **kwargs)
    if is_split(model):
        settle_adapters(split_module(model))
    return found


_FUNCTIONS = {
    "get_peft_model_state_dict": _whole_state,
    "set_peft_model_state_dict": _loaded,
    "_reshard_dtensor_values_for_load": _as_they_are,
}
"""Functions of PEFT's that others import by name → what is called in their place."""
