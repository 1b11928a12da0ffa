"""Tiny models whose heads do not divide by 2, 3 or 4 ranks, in every layout of heads."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

import plait
from plait.run import seeds
from plait.testing import add_noise

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A model type with the heads of its attention.

    Attributes:
        kind: transformers' model type.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        fields: Config fields; `SIZES` and the counts are added where the type has them.
        v_dim: Features of a value head.
        style: The style that the projection of the queries gets.
        family: transformers' auto class.
        cached: What its cache holds on a rank: its "kv" heads; a key and value for each "query"
            head; the "latent", which is one for all heads; or "" for a cache of another form.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    fields: dict[str, Any] = field(default_factory=dict)
    v_dim: int = 4
    style: str = "colwise"
    family: str = "AutoModelForCausalLM"
    cached: str = "kv"


def separate(kind: str, num_heads: int, num_kv_heads: int, **fields: Any) -> Case:
    """Projections of their own for q, k and v."""
    counts = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_size": 4 * num_heads,
    }
    return Case(kind, num_heads, num_kv_heads, {**counts, **fields})


def fused(kind: str, style: str, num_heads: int, num_kv: int = 0, **fields: Any) -> Case:
    """One projection for q, k and v."""
    return Case(kind, num_heads, num_kv or num_heads, fields, style=style)


_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
_MLA: dict[str, Any] = {
    "hidden_size": 20,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "head_dim": 2,
    "v_head_dim": 3,
    "kv_lora_rank": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def latent(kind: str, **fields: Any) -> Case:
    """Keys and values from a latent that all heads share."""
    return Case(kind, 5, 5, {**_MLA, **fields}, v_dim=3, cached="latent")


SEPARATE = {
    "llama 9/3": separate("llama", 9, 3, attention_bias=True),
    "llama 6/3": separate("llama", 6, 3, attention_bias=True),
    "llama 4/1": separate("llama", 4, 1, attention_bias=True),
    "llama 5/1": separate("llama", 5, 1),
    "llama 4/2": separate("llama", 4, 2, attention_bias=True),
    "llama 7/7": separate("llama", 7, 7),
    "qwen2 9/3": separate("qwen2", 9, 3),
    "qwen3 6/3": separate("qwen3", 6, 3, head_dim=4),
}
"""q, k and v apart."""

FUSED = {
    "gpt2": fused("gpt2", "colwise_qkv", 5, n_embd=20, n_head=5, n_layer=1, n_inner=12),
    "phi3": fused(
        "phi3",
        "colwise_qkv",
        9,
        3,
        hidden_size=36,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "mpt": Case(
        "mpt",
        5,
        5,
        {"d_model": 20, "n_heads": 5, "n_layers": 1, "expansion_ratio": 1, "max_seq_len": 64},
        style="colwise_qkv",
    ),
    "bloom": fused("bloom", "colwise_qkv_per_head", 5, hidden_size=20, n_head=5, n_layer=1),
    "gpt_neox": fused("gpt_neox", "colwise_qkv_per_head", 5, hidden_size=20, num_attention_heads=5),
    "falcon": Case(
        "falcon",
        9,
        3,
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_kv_heads": 3,
            "new_decoder_architecture": True,
            "bias": True,
        },
        style="colwise_qkv_per_group",
        cached="query",
    ),
    "falcon rw": fused(
        "falcon",
        "colwise_qkv_per_head",
        5,
        hidden_size=20,
        num_attention_heads=5,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        new_decoder_architecture=False,
        bias=True,
    ),
    "falcon 7b": fused(
        "falcon",
        "colwise_qkv",
        5,
        1,
        hidden_size=20,
        num_attention_heads=5,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
    ),
}
"""One projection for all three."""

OTHERS = {
    "olmo2": separate("olmo2", 9, 3),
    "olmoe": separate("olmoe", 6, 3, **_MOE),
    "minimax_m2": separate("minimax_m2", 9, 3, **_MOE, rotary_dim=2),
    "deepseek_v2": Case(
        "deepseek_v2", 5, 5, {**_MLA, "q_lora_rank": None}, v_dim=3, cached="latent"
    ),
    "deepseek_v3": Case("deepseek_v3", 5, 5, {**_MLA, "q_lora_rank": 6}, v_dim=3, cached="latent"),
    "gpt_oss": separate("gpt_oss", 9, 3, **_MOE, sliding_window=4),
    "cohere": separate("cohere", 9, 3, use_qk_norm=True),
    "t5": Case(
        "t5",
        5,
        5,
        {"d_model": 20, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 5}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.0},
        family="AutoModelForSeq2SeqLM",
        cached="",
    ),
}
"""Norms over all heads, latent attention, sinks, norms of single heads, a bias by head."""

CASES = SEPARATE | FUSED | OTHERS


def pair(name: str, dtype: torch.dtype = torch.float64, check: bool = False) -> tuple[Any, Any]:
    """A model, split by the improved plan, as a rule without a proof, and the same model whole."""
    whole = model(name, dtype)
    split = copy.deepcopy(whole)
    plait.parallelize(split, check=check)
    return split, whole


def model(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """The model of a case with noise on every parameter."""
    import transformers

    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.kind, **{**SIZES, **case.fields, **fields})
    config._experts_implementation = "eager"  # grouped_mm has no float64
    with seeds.borrowed(0):
        made = getattr(transformers, case.family).from_config(config, dtype=dtype)
    return add_noise(made.eval())


def batch(name: str, *, size: int = 3, length: int = 7, padded: bool = True) -> dict[str, Any]:
    """Ids and labels; padding on the left of the last sequence."""
    draw = torch.Generator().manual_seed(size * 100 + length)
    ids = torch.randint(3, 95, (size, length), generator=draw)
    made = {"input_ids": ids, "labels": ids.clone()}
    if padded and length > 3:
        mask = torch.ones_like(ids)
        mask[-1, :2] = 0
        made |= {"attention_mask": mask}
        if CASES[name].family == "AutoModelForCausalLM":
            made["labels"] = ids.masked_fill(mask == 0, -100)
    return made
