"""What a transformers model needs beside its split layers: generate() and save_pretrained()."""

import sys
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from plait.hf import generation, resizing, saving
from plait.hf.features import bind_features
from plait.hf.peft.loading import load_adapter
from plait.state import STATE, ParallelState, gathered, own_class


def is_transformers_model(module: nn.Module) -> bool:
    """Whether `module` is a model of transformers (which need not be installed)."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def adapt(model: Any, state: ParallelState) -> None:
    """Bind the methods of a split transformers model that have to know that it is split.

    Args:
        model: The model, after its layers were split.
        state: How they were.
    """
    for name, part in model.named_modules():
        if not is_transformers_model(part):
            continue
        if part is not model:  # its base model, or an encoder, can be saved by itself
            below = f"{name}."
            layouts = {k[len(below) :]: v for k, v in state.layouts.items() if k.startswith(below)}
            part.__dict__[STATE] = replace(state, layouts=layouts)
        bind_features(part)
        part.__dict__["save_pretrained"] = MethodType(saving.save_pretrained, part)
        part.__dict__["load_adapter"] = MethodType(load_adapter, part)
        part.__dict__["resize_token_embeddings"] = MethodType(
            resizing.resize_token_embeddings, part
        )
    if model.can_generate():
        generation.install(model, state.tp_mesh)
        if state.data_mesh is not None:
            model.__dict__["_plait_generate"] = model.__dict__.get("generate")
            model.__dict__["generate"] = MethodType(_generate_gathered, model)


def _generate_gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of a sharded model: each data rank goes its own way, on gathered parameters.

    All data ranks must call it, with inputs of their own and any number of new tokens.
    """
    own: Any = own_class(self)
    inner = self.__dict__["_plait_generate"] or MethodType(own.generate, self)
    with gathered(self):
        return inner(*args, **kwargs)
