"""Learned prompts and prefixes before a split model: plain parameters, the same on every rank.

A prompt is embedded beside the words and goes through the model whole, so its gradient is whole on
every rank. A prefix is keys and values for all heads: each rank's attention takes those of its own
heads, and the ranks' gradients are terms of a sum.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import PlaitError
from plait.hf.peft.on_parts import is_sharded_root
from plait.run.around import split_module
from plait.state import own_class, state_of


def set_up(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> Any:
    """`PeftModel._setup_prompt_encoder`: the first rank's initial values are everybody's.

    Raises:
        PlaitError: The model is sharded over data ranks.

    Comm:
        One broadcast of each of the encoder's parameters.
    """
    model = split_module(peft_model.base_model)
    state = state_of(model)
    if state is None:
        return call(*args, **kwargs)
    if is_sharded_root(model):
        raise PlaitError(
            f"Learned prompts of a {own_class(model).__name__} that is sharded over data ranks:",
            "PEFT embeds words before it calls the model; FSDP gathers the embedding in the call",
            ["LoRA works on sharded models", "tp_size alone allows learned prompts"],
        )
    found = call(*args, **kwargs)
    adapter = args[0] if args else kwargs["adapter_name"]
    with torch.no_grad():
        for param in peft_model.prompt_encoder[adapter].parameters():
            param.copy_(comm.broadcast(param.detach().contiguous(), state.tp_mesh))
    return found


def get_prompt(call: Callable[..., Any], peft_model: Any, args: Any, kwargs: Any) -> Any:
    """`PeftModel.get_prompt`: of keys and values those of the rank's own heads.

    Comm:
        Backward one all-reduce of each layer's keys and values.
    """
    found = call(*args, **kwargs)
    model = split_module(peft_model.base_model)
    state = state_of(model)
    if state is None or isinstance(found, torch.Tensor):
        return found
    heads = _heads_by_layer(model, state)
    layers = getattr(found, "layers", None)
    if layers is None:
        raise PlaitError(
            f"A prefix for a split {own_class(model).__name__}:",
            f"PEFT makes a {type(found).__name__} of it, which plait does not know",
            "LoRA, or learned prompts",
        )
    for number, layer in enumerate(layers):
        own = heads.get(number)
        if own is not None and getattr(layer, "keys", None) is not None:
            layer.keys = _own_heads(layer.keys, own, state.tp_mesh)
            layer.values = _own_heads(layer.values, own, state.tp_mesh)
    return found


def _heads_by_layer(model: Any, state: Any) -> dict[int, tuple[int, ...]]:
    """The key/value heads of this rank in every layer whose attention is split."""
    rank, modules = state.tp_mesh.get_local_rank(), dict(model.named_modules())
    found = {}
    for number, (name, attention) in enumerate(state.plan.attention.items()):
        layer = getattr(modules.get(name), "layer_idx", None)
        found[number if layer is None else int(layer)] = attention.heads.kv[rank]
    return found


def _own_heads(x: torch.Tensor, heads: tuple[int, ...], mesh: DeviceMesh) -> torch.Tensor:
    """Keys or values `[batch, heads, tokens, head_dim]` of some heads."""
    return comm.copy_to(x, mesh)[:, list(heads)]
