"""The contenders: one checkpoint, read and split by plait, by its peers, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def llama_config(layers: int, hidden: int, vocab: int, parts: int = 1) -> Any:
    """Llama with 16 query and 4 KV heads that never stops by itself.

    Args:
        layers: Number of layers.
        hidden: Hidden size; the MLP is 2.75 times as wide.
        vocab: Size of the vocabulary.
        parts: Divides the heads, the MLP and the vocabulary: what one of so many ranks computes.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // parts,
        num_attention_heads=16 // parts,
        num_key_value_heads=4 // parts,
        head_dim=hidden // 16,
        vocab_size=vocab // parts,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def write_checkpoint(path: Path, config: Any, dtype: torch.dtype, shard: str = "5GB") -> int:
    """A checkpoint of random weights, the same on every machine; its size in bytes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(path, max_shard_size=shard)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def one_process(path: str) -> nn.Module:
    """transformers, whole."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


def plait_tp(path: str) -> nn.Module:
    """plait, split over all ranks by the model's own plan."""
    from plait import AutoModelForCausalLM, DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", distributed_config=config)


def transformers_tp(path: str) -> nn.Module:
    """transformers' own tensor parallelism, by the model's own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", distributed_config=config)


def torch_tp(path: str, logits: str = "whole") -> nn.Module:
    """torch's `parallelize_module` with the plan of its tutorials.

    Args:
        path: The checkpoint; every rank reads all of it, then splits it.
        logits: `whole` gathers them in the head; `split` leaves them to the loss, as a DTensor.
    """
    model = one_process(path)
    head = {"whole": {"output_layouts": Replicate()}, "split": {"use_local_output": False}}
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(**{"output_layouts": Shard(-1), **head[logits]}),  # type: ignore[arg-type]
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)  # type: ignore[arg-type]


def floor(path: str) -> nn.Module:
    """What a rank computes at least: a whole model of a rank's sizes; no rank talks to another."""
    return one_process(f"{path}/floor")


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    local = (getattr(p, "_local_tensor", p) for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in local)


READERS: dict[str, Callable[..., nn.Module]] = {
    "one": one_process,
    "plait": plait_tp,
    "transformers": transformers_tp,
    "torch": torch_tp,
    "floor": floor,
}
