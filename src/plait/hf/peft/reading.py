"""Adapters in PEFT's ordinary files, put on a model that runs, split or not."""

import json
import os
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("LORA", "IA3")
"""Kinds whose layers go into the model itself, so that the model generates with them."""

_WAY = "give the directory that PEFT's save_pretrained has written"


def check_adapter(path: str) -> None:
    """Refuses what is no adapter's directory, before a model is read.

    Raises:
        PlaitError: A file is missing, or its kind is not one of `KINDS`.
    """
    place = Path(os.path.expanduser(path))
    asked = f"The adapter {path}:"
    if not place.is_dir():
        raise PlaitError(asked, "there is no such directory", _WAY)
    missing = [f"it has no {name}" for name in (CONFIG, WEIGHTS) if not (place / name).is_file()]
    if missing:
        raise PlaitError(asked, missing, _WAY)
    try:
        config = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlaitError(asked, f"{CONFIG} cannot be read: {error}", _WAY) from None
    if not isinstance(config, dict) or not config.get("peft_type"):
        raise PlaitError(asked, f"{CONFIG} names no peft_type", _WAY)
    if config["peft_type"] not in KINDS:
        raise PlaitError(
            asked,
            f"adapters of kind {config['peft_type']} are not supported here",
            (f"an adapter of kind {' or '.join(KINDS)}", "PeftModel.from_pretrained in a script"),
        )


def with_adapter(model: Any, path: str) -> Any:
    """The model with the adapter of a directory on it, for use, not for training.

    Args:
        model: A model of transformers, split or not.
        path: The directory.

    Returns:
        PEFT's model around `model`.

    Raises:
        PlaitError: As `check_adapter`; or PEFT cannot put it on this model.

    Comm: that of PEFT's loading on a split model. All ranks must call.
    """
    check_adapter(path)
    try:
        from peft import PeftModel
    except ImportError:
        raise PlaitError(
            f"The adapter {path}:", "peft is not installed", "pip install 'plait[peft]'"
        ) from None
    place = os.path.expanduser(path)
    _check_names(model, path)
    try:
        return PeftModel.from_pretrained(model, place, torch_device=str(model.device)).eval()
    except (ValueError, RuntimeError, KeyError) as error:
        raise PlaitError(
            f"The adapter {path} on {type(model).__name__}:",
            f"it does not fit: {error}",
            "give the model that the adapter was trained on",
        ) from error


def _check_names(model: Any, path: str) -> None:
    """Refuses an adapter of layers that the model does not have, before anything is changed.

    Raises:
        PlaitError: There are such layers, or the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    asked = f"The adapter {path} on {type(model).__name__}:"
    try:
        with safe_open(Path(os.path.expanduser(path)) / WEIGHTS, "pt") as file:
            keys = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise PlaitError(asked, f"{WEIGHTS} cannot be read: {error}", _WAY) from None
    known = {name for name, _ in model.named_modules()}
    layers = {
        key.removeprefix("base_model.model.").split(mark)[0].removesuffix(".base_layer")
        for key in keys
        for mark in (".lora_", ".ia3_")
        if mark in key
    }
    unknown = sorted(layers - known)
    if unknown:
        raise PlaitError(
            asked,
            [f"it does not fit: the model has no layer {name}" for name in unknown[:5]],
            "give the model that the adapter was trained on",
        )
