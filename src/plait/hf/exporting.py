"""What lets a model's tensors become a directory of transformers later, without the model.

A training's checkpoint keeps the config, generation config and tokenizer, and the names that the
weight files would have. From these the model is made once more on the meta device, and how its
tensors become those of the files.
"""

import contextlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import PlaitError
from plait.hf import skeleton
from plait.hf.conversion import convert, revert, saved_names
from plait.shapes.files import CheckpointFiles
from plait.state import own_class
from plait.weights.checkpoint import Checkpoint, Read
from plait.weights.recipes import Recipe
from plait.weights.regions import Region
from plait.weights.store import TensorStore

Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Names with shapes and dtypes."""


def without_values(tensors: Described) -> Checkpoint:
    """A checkpoint of which only the header is known."""

    def read(region: Region, out: torch.Tensor) -> None:
        raise PlaitError("Read a tensor:", "only its shape is known")

    entries: dict[str, tuple[tuple[int, ...], torch.dtype, int, Read]] = {
        name: (shape, dtype, 0, read) for name, (shape, dtype) in tensors.items()
    }
    return Checkpoint(CheckpointFiles("safetensors", (), None, "a list of names"), entries, [])


def write_configs(model: Any, directory: Path) -> None:
    """Writes the config and generation config of a model, and the code that comes with it."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [own_class(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=model.config)
    model.config.save_pretrained(directory)
    if model.can_generate():
        with contextlib.suppress(AttributeError):  # a model may generate without such a config
            model.generation_config.save_pretrained(directory)


def files_beside(model: Any, tokenizer: Any = None) -> dict[str, bytes]:
    """The files that stand beside a model's weights, by their paths.

    Args:
        model: A model of transformers, split or not.
        tokenizer: What has a `save_pretrained`: a tokenizer or processor.
    """
    with tempfile.TemporaryDirectory(prefix="plait-") as name:
        folder = Path(name)
        write_configs(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def stored_tensors(model: nn.Module, tensors: Described) -> dict[str, tuple[list[int], str]] | None:
    """The names, shapes and dtypes that the weight files of a model have.

    Args:
        model: A model of transformers, split or not.
        tensors: Its whole tensors, tied ones under every name.

    Returns:
        Those, or None where the files cannot be told.
    """
    try:
        store = without_values(tensors)
        recipes = revert(model, saved_names(model), store)
        return {
            name: (list(recipe.shape(store)), _name(recipe.dtype(store)))
            for name, recipe in recipes.items()
        }
    except PlaitError:
        return None


def described(stored: Mapping[str, Sequence[Any]]) -> Described:
    """The inverse of what `stored_tensors` writes."""
    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in stored.items()}


def empty_copy(folder: Path, class_name: str, stored: Collection[str]) -> Any:
    """The model of a config, on the meta device.

    Args:
        folder: Where its config.json is.
        class_name: Its class in transformers.
        stored: The names under which its tensors are stored; names that the config ties and that
            are both there have tensors of their own.

    Raises:
        PlaitError: transformers has no such class.
    """
    import transformers

    config, _ = skeleton.read_config(str(folder), {}, {})
    made_by = getattr(transformers, class_name, None)
    if made_by is None:
        raise PlaitError(
            f"The model class {class_name}:",
            "transformers has none of this name: its code came with the model",
            "make the model, plait.checkpoint.load into it, then model.save_pretrained",
        )
    dtype = skeleton.choose_dtype(None, config, lambda: None)
    model = skeleton.empty_model(None, config, dtype, {}, made_by=made_by)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    skeleton.untie(model, [n for n, other in tied.items() if n in stored and other in stored])
    return model


def recipes_of(model: Any, store: TensorStore, stored: Described) -> dict[str, Recipe]:
    """How the tensors of a model's weight files are made from its own.

    Args:
        model: As `empty_copy` makes it.
        store: Its own tensors.
        stored: The names of the files' tensors.

    Raises:
        PlaitError: This version of transformers makes others of them.
    """
    transforms = convert(model, without_values(stored)).transforms
    recipes = revert(model, saved_names(model), store, transforms)
    differ = sorted(set(recipes) ^ set(stored))
    if differ:
        raise PlaitError(
            "The names of the weight files:",
            [f"{name} is in only one of then and now" for name in differ[:6]],
            "use the version of transformers that the checkpoint was saved with",
        )
    return recipes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
