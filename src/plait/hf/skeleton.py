"""A transformers model on the meta device: config, class and dtypes, without a weight."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from plait.errors import PlaitError, WeightsError


def read_config(path: str, hub: Mapping[str, Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict]:  # type: ignore[type-arg]
    """The config of a checkpoint, with the overrides in `kwargs` applied.

    Args:
        path: A directory or the name of a model on the hub.
        hub: Arguments that say where files come from.
        kwargs: Overrides of config fields, and arguments that are not the config's.

    Returns:
        The config, and the arguments it did not take.

    Raises:
        WeightsError: There is no readable config.
    """
    from transformers import AutoConfig

    try:
        config, unused = AutoConfig.from_pretrained(
            path, return_unused_kwargs=True, **hub, **kwargs
        )
    except (OSError, ValueError) as error:
        if isinstance(error, PlaitError):
            raise
        raise WeightsError(
            f"Reading the config of {path!r}:",
            " ".join(str(error).split()),
            ["check the path or the model's name", "a model directory has a config.json"],
        ) from error
    return config, unused


def refuse_quantized(config: Any) -> None:
    """Refuse a checkpoint whose weights are stored quantized.

    Raises:
        WeightsError: It is one.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    raise WeightsError(
        f"A tensor-parallel model from a checkpoint quantized with {method}:",
        "splitting block-scaled weights is not supported yet",
        ["use the checkpoint with unquantized weights", "tp_size=1"],
    )


def choose_dtype(dtype: Any, config: Any, stored: Callable[[], torch.dtype | None]) -> torch.dtype:
    """The dtype of the model.

    Args:
        dtype: As given: a dtype, its name, `"auto"` or None (which mean: as stored).
        config: The model's config, whose `dtype` decides for `"auto"`.
        stored: The floating dtype found in the files, asked only where the config names none.

    Raises:
        WeightsError: `dtype` names none.
    """
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None) or stored() or torch.get_default_dtype()
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WeightsError(
            f"dtype={dtype!r}:",
            "it is no floating dtype of torch",
            "dtype=torch.bfloat16, or 'auto'",
        )
    return dtype


def override(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Set fields of a config, as transformers does where it reads one.

    A dict for a config inside of the config changes the fields it names and keeps the others.

    Args:
        config: The config, changed in place.
        fields: Field name → value.

    Returns:
        The entries that are no fields of the config.
    """
    rest = {}
    for name, value in fields.items():
        if not hasattr(config, name):
            rest[name] = value
            continue
        inner = getattr(config, name)
        if hasattr(inner, "to_dict") and isinstance(value, dict):
            value = type(inner)(**{**inner.to_dict(), **value})
        setattr(config, name, value)
    return rest


def model_class(
    auto_class: Any, config: Any, path: str, hub: Mapping[str, Any], code: Mapping[str, Any]
) -> tuple[Any, bool]:
    """The class that makes the model, and whether it is code that comes with the model.

    The revision and the place of that code are the caller's, which `from_config` would not know.

    Args:
        auto_class: An auto class of transformers.
        config: The model's config.
        path: Where the model comes from.
        hub: Arguments that say where files come from.
        code: `trust_remote_code` and `code_revision`.

    Returns:
        The class (None where transformers has none for the config), and True for own code.
    """
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory

    mapping = auto_class._model_mapping
    known = type(config) in mapping
    own = auto_factory._get_model_class(config, mapping) if known else None
    reference = (getattr(config, "auto_map", None) or {}).get(auto_class.__name__)
    registered = own is not None and not own.__module__.startswith("transformers.")
    if reference is None or registered:
        return own, False
    elsewhere = reference.split("--")[0] if "--" in reference else None
    trusted = dynamic_module_utils.resolve_trust_remote_code(
        code["trust_remote_code"], path, known, True, upstream_repo=elsewhere
    )
    if not trusted:
        return own, False
    made = dynamic_module_utils.get_class_from_dynamic_module(
        reference, path, code_revision=code["code_revision"], **hub
    )
    if not known:
        auto_class.register(type(config), made, exist_ok=True)
    made.register_for_auto_class(auto_class=auto_class)
    return auto_factory.add_generation_mixin_to_remote_model(made), True


def empty_model(
    auto_class: Any,
    config: Any,
    dtype: torch.dtype,
    kwargs: Mapping[str, Any],
    made_by: Any = None,
) -> Any:
    """The model on the meta device, in evaluation mode.

    Args:
        auto_class: An auto class of transformers.
        config: Its config.
        dtype: Dtype of the parameters.
        kwargs: What `from_config` takes (`attn_implementation`, …).
        made_by: The class to make it of, where the auto class is not to choose one.
    """
    from transformers import initialization

    contexts = [torch.device("meta"), initialization.no_init_weights()]
    safe_ops = getattr(initialization, "meta_device_safe_creation_ops", None)
    make = auto_class.from_config if made_by is None else made_by._from_config
    with contextlib.ExitStack() as stack:
        for context in contexts + ([safe_ops()] if safe_ops else []):
            stack.enter_context(context)
        model = make(config, dtype=dtype, **kwargs)
    model.tie_weights()  # left out with the initialisation of the weights
    model.eval()
    return model


def untie(model: Any, names: Iterable[str]) -> None:
    """Give names that a config ties a parameter of their own."""
    for name in names:
        owner, _, local_name = name.rpartition(".")
        module = model.get_submodule(owner)
        tied = module._parameters[local_name]
        module._parameters[local_name] = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
        model.all_tied_weights_keys.pop(name, None)


def dtype_rule(model: Any, dtype: torch.dtype) -> Callable[[str, torch.dtype], torch.dtype]:
    """The dtype that each tensor of a checkpoint becomes.

    Floating tensors become `dtype`, except the modules that their model keeps in float32; others
    stay as they are.
    """
    plan: dict[re.Pattern[str], torch.dtype] = {
        _glob(pattern): kept for pattern, kept in model._get_dtype_plan(dtype).items()
    }
    slots: dict[str, torch.dtype] = {
        n: t.dtype for n, t in [*model.named_parameters(), *model.named_buffers()]
    }

    def rule(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        for pattern, kept in plan.items():
            if pattern.search(name):
                return kept
        return slots.get(name, dtype)

    return rule


def load_generation_config(model: Any, path: str, hub: Mapping[str, Any], given: Any) -> None:
    """Give the model the generation config it was saved with, or the caller's.

    Args:
        model: A model that may be able to generate.
        path: Where it came from.
        hub: Arguments that say where files come from.
        given: The caller's generation config, or None.
    """
    if not model.can_generate() or not hasattr(model, "generation_config"):
        return
    if given is not None:
        model.generation_config = model.generation_config.from_dict(given.to_dict())
        return
    if os.path.isfile(path):
        return
    from transformers import GenerationConfig

    # Models of old keep the settings in their config.json.
    old = {"config_file_name": "config.json", "_from_model_config": True}
    for place in ({}, old):
        with contextlib.suppress(OSError):  # none was saved there
            model.generation_config = GenerationConfig.from_pretrained(path, **hub, **place)
            return


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r".*"))


def initialise_missing(
    model: Any,
    missing: list[str],
    device: torch.device,
    cut: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Give every tensor that no file holds the value that its model's own initialisation gives.

    Parameters are initialised whole and cut afterwards, so that every rank has its slice of the
    same tensor; of tied ones the module initialises it that the others follow. Buffers that are
    never stored (rotary tables) are computed.

    Args:
        model: The model, its stored tensors read.
        missing: Names of the parameters and persistent buffers without a value.
        device: Where they go.
        cut: From the name of a parameter and its whole tensor to what this rank keeps.
    """
    todo = set(missing)
    params = dict(model.named_parameters(remove_duplicate=False))
    leaders = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in [*params.items(), *model.named_buffers()]:
        tensor._is_hf_initialized = name not in todo and not tensor.is_meta
    fresh: dict[int, nn.Parameter] = {}
    places: list[tuple[str, nn.Module, str, int]] = []
    with torch.no_grad():
        for owner, module in model.named_modules():
            for local_name, param in list(module._parameters.items()):
                name = f"{owner}.{local_name}" if owner else local_name
                if param is None or name not in todo:
                    continue
                places.append((name, module, local_name, id(param)))
                leader = leaders.get(name)
                if leader in todo and params[leader] is param:
                    aside: Any = nn.Parameter(torch.empty_like(param, device="meta"))
                    aside._is_hf_initialized = True
                    module._parameters[local_name] = aside
                    continue
                if id(param) not in fresh:
                    whole = torch.empty(param.shape, dtype=param.dtype, device=device)
                    fresh[id(param)] = nn.Parameter(whole, param.requires_grad)
                module._parameters[local_name] = fresh[id(param)]
            for local_name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.is_meta:
                    module._buffers[local_name] = torch.empty_like(buffer, device=device)
        model.initialize_weights()
        kept: dict[int, nn.Parameter] = {}
        for name, module, local_name, key in places:
            if key not in kept:
                kept[key] = nn.Parameter(cut(name, fresh[key].detach()), fresh[key].requires_grad)
            module._parameters[local_name] = kept[key]
