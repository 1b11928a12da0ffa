"""Small models whose attention has what most have not: sinks, soft caps, chunks, experts beside."""

from typing import Any

from plait.run import seeds
from plait.testing import add_noise, tiny

MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 4, "sliding_window": 4, "num_local_experts": 4},
    "gemma2": {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4},
    "llama4_text": {
        "head_dim": 4,
        "attention_chunk_size": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
    "mixtral": {"head_dim": 4, "num_local_experts": 4},
}


def model(name: str, **fields: Any) -> Any:
    """A small model in training mode, of `tiny` or of these."""
    if name not in MORE:
        return add_noise(tiny.model(name, **fields)).train()
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**tiny.SIZES, **MORE[name], **fields})
    config._experts_implementation = "eager"
    with seeds.borrowed(0):
        return add_noise(tiny.from_config(config, tiny.torch.float64)).train()
