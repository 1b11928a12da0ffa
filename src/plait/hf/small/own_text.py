"""What small copies of single language models need beyond the rules that hold for all.

Every function sets fields of one config; it gets the sizes of the small copy.
"""

import math
from typing import Any


def _bamba(fields: dict[str, Any], sizes: Any) -> None:
    fields["attn_layer_indices"] = [1]
    fields["mamba_n_heads"] = fields["mamba_expand"] * sizes.hidden // fields["mamba_d_head"]


def _granite_hybrid(fields: dict[str, Any], sizes: Any) -> None:
    fields["layer_types"] = ["linear_attention", "full_attention"]
    fields["mamba_n_heads"] = fields["mamba_expand"] * sizes.hidden // fields["mamba_d_head"]


def _falcon_h1(fields: dict[str, Any], sizes: Any) -> None:
    fields["mamba_d_ssm"] = sizes.hidden
    fields["mamba_n_heads"] = sizes.hidden // fields["mamba_d_head"]


def _mamba2(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_heads"] = fields["expand"] * sizes.hidden // fields["head_dim"]


def _zamba(fields: dict[str, Any], sizes: Any) -> None:
    fields["layers_block_type"] = ["linear_attention", "hybrid", "hybrid"]
    fields["num_hidden_layers"] = 3
    fields["attention_hidden_size"] = 2 * sizes.hidden
    fields["attention_head_dim"] = 2 * sizes.head_dim
    fields["mamba_headdim"] = sizes.head_dim
    fields["n_mamba_heads"] = 2
    if "hybrid_layer_ids" in fields:
        fields["hybrid_layer_ids"] = [1, 2]
        fields["n_mamba_heads"] = fields["mamba_expand"] * sizes.hidden // sizes.head_dim
        fields["num_query_groups"] = sizes.heads
        fields["num_key_value_heads"] = sizes.heads


def _xlstm(fields: dict[str, Any], sizes: Any) -> None:
    """Its code rounds some widths up to multiples of 64, and others not."""
    fields["hidden_size"] = math.lcm(64, sizes.hidden)
    fields["qk_dim_factor"] = 1.0
    fields["chunk_size"] = 16


def _recurrent_gemma(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_hidden_layers"] = 3
    fields["lru_width"] = sizes.hidden


def _hrm_text(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_layers_per_stack"] = 1
    fields["num_hidden_layers"] = fields["H_cycles"] * (fields["L_cycles"] + 1)


def _reformer(fields: dict[str, Any], sizes: Any) -> None:
    fields["axial_pos_embds_dim"] = (sizes.hidden // 2, sizes.hidden - sizes.hidden // 2)
    fields["axial_pos_shape"] = (8, 8)
    fields["attn_layers"] = ["local", "lsh"]
    fields["num_hidden_layers"] = 2
    fields["local_attn_chunk_length"] = fields["lsh_attn_chunk_length"] = 4
    fields["num_buckets"] = 4


def _dots1(fields: dict[str, Any], sizes: Any) -> None:
    fields["n_routed_experts"] = fields["n_routed_experts"] or 4
    fields["num_experts_per_tok"] = fields["num_experts_per_tok"] or 2
    fields["n_shared_experts"] = fields["n_shared_experts"] or 1


def _lfm2_moe(fields: dict[str, Any], sizes: Any) -> None:
    if fields["layer_types"] is None:
        fields["layer_types"] = ["conv", "full_attention"]


def _shared_key_values(fields: dict[str, Any], sizes: Any) -> None:
    """Layers at the end that use the keys and values of earlier ones: one of each kind twice."""
    if not fields.get("num_kv_shared_layers"):
        return
    kinds = list(dict.fromkeys(fields["layer_types"]))
    spec = fields.get("_heterogeneity_spec")
    overrides = getattr(spec, "per_layer_overrides", {})
    of_kind = [dict(overrides.get(fields["layer_types"].index(kind), {})) for kind in kinds]
    overrides.clear()
    overrides.update({n: own for n, own in enumerate([*of_kind, *of_kind]) if own})
    fields["layer_types"] = kinds + kinds
    fields["num_hidden_layers"] = len(fields["layer_types"])
    fields["num_kv_shared_layers"] = len(kinds)
    for name in ("intermediate_size", "activation_sparsity_pattern"):
        if isinstance(fields.get(name), list):
            fields[name] = (fields[name] * len(kinds) * 2)[: 2 * len(kinds)]


def _xmod(fields: dict[str, Any], sizes: Any) -> None:
    fields["default_language"] = fields["default_language"] or fields["languages"][0]


def _dbrx(fields: dict[str, Any], sizes: Any) -> None:
    attention = vars(fields["attn_config"])
    attention.setdefault("rope_theta", 10000.0)
    attention["clip_qkv"] = attention["clip_qkv"] or 8


def _deepseek_v2(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_experts_per_tok"] = fields["num_experts_per_tok"] or 2


def _blt(fields: dict[str, Any], sizes: Any) -> None:
    fields.setdefault("num_hidden_layers", fields["decoder_config"].num_hidden_layers)
    wide = vars(fields["encoder_config"])["cross_attn_k"]
    for name in ("encoder_config", "decoder_config"):
        vars(fields[name])["hidden_size_global"] = wide * sizes.hidden
    vars(fields["global_config"])["hidden_size"] = wide * sizes.hidden
    vars(fields["global_config"])["head_dim"] = wide * sizes.head_dim
    fields["encoder_hash_byte_group_vocab"] = 61
    fields["encoder_hash_byte_group_size"] = [3, 4]


def _roc_bert(fields: dict[str, Any], sizes: Any) -> None:
    fields.update(pronunciation_embed_dim=16, pronunciation_vocab_size=31)
    fields.update(shape_embed_dim=16, shape_vocab_size=31)


OWN: dict[str, Any] = {
    "bamba": _bamba,
    "blt": _blt,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "dots1": _dots1,
    "falcon_h1": _falcon_h1,
    "gemma3n_text": _shared_key_values,
    "gemma4_text": _shared_key_values,
    "gemma4_unified_text": _shared_key_values,
    "granitemoehybrid": _granite_hybrid,
    "hrm_text": _hrm_text,
    "lfm2_moe": _lfm2_moe,
    "mamba2": _mamba2,
    "recurrent_gemma": _recurrent_gemma,
    "reformer": _reformer,
    "roc_bert": _roc_bert,
    "xlstm": _xlstm,
    "xmod": _xmod,
    "zamba": _zamba,
    "zamba2": _zamba,
}
"""Model type → what its small config needs."""
