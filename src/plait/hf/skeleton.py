"""A transformers model on the meta device: config, class and dtypes, without a weight."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
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


def empty_model(auto_class: Any, config: Any, dtype: torch.dtype, kwargs: Mapping[str, Any]) -> Any:
    """The model on the meta device, in evaluation mode.

    Args:
        auto_class: An auto class of transformers.
        config: Its config.
        dtype: Dtype of the parameters.
        kwargs: What `from_config` takes (`attn_implementation`, `trust_remote_code`, …).
    """
    from transformers import initialization

    contexts = [torch.device("meta"), initialization.no_init_weights()]
    safe_ops = getattr(initialization, "meta_device_safe_creation_ops", None)
    with contextlib.ExitStack() as stack:
        for context in contexts + ([safe_ops()] if safe_ops else []):
            stack.enter_context(context)
        model = auto_class.from_config(config, dtype=dtype, **kwargs)
    model.tie_weights()  # left out with the initialisation of the weights
    model.eval()
    return model


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
        model.generation_config = given
        return
    from transformers import GenerationConfig

    if not os.path.isfile(path):
        with contextlib.suppress(OSError):  # none was saved: the model's own defaults stay
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)


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
    same tensor. Buffers that are never stored (rotary tables) are computed.

    Args:
        model: The model, its stored tensors read.
        missing: Names of the parameters and persistent buffers without a value.
        device: Where they go.
        cut: From the name of a parameter and its whole tensor to what this rank keeps.
    """
    todo = set(missing)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        tensor._is_hf_initialized = name not in todo and not tensor.is_meta
    fresh: dict[int, nn.Parameter] = {}
    places: list[tuple[str, nn.Module, str, int]] = []
    with torch.no_grad():
        for owner, module in model.named_modules():
            for local_name, param in list(module._parameters.items()):
                name = f"{owner}.{local_name}" if owner else local_name
                if param is None or name not in todo:
                    continue
                if id(param) not in fresh:
                    whole = torch.empty(param.shape, dtype=param.dtype, device=device)
                    fresh[id(param)] = nn.Parameter(whole, param.requires_grad)
                places.append((name, module, local_name, id(param)))
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
