"""What small copies of single model types need beyond the rules that hold for all."""

from collections.abc import Iterator
from typing import Any


def parts(config: Any) -> Iterator[Any]:
    """A config and all configs inside it, the outermost first."""
    from transformers import PretrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from parts(value)


def mend(config: Any, sizes: Any) -> None:
    """Set what the fields of a small config must be for its model type, in place."""
    for part in parts(config):
        _fill(vars(part), sizes)
        _section(part, sizes)
        own = _OWN.get(getattr(part, "model_type", ""))
        if own is not None:
            own(vars(part), sizes)


SECTIONED = {
    "cohere_compass_text": 3,
    "cosmos3_edge_text": 3,
    "ernie4_5_vl_moe_text": 3,
    "glm46v_text": 3,
    "glm4v_moe_text": 3,
    "glm4v_text": 3,
    "glm_ocr_text": 3,
    "glmga_text": 3,
    "hunyuan_vl_text": 4,
    "paddleocr_vl_text": 3,
    "qwen2_5_omni_text": 3,
    "qwen2_5_vl_text": 3,
    "qwen2_vl_text": 3,
    "qwen3_omni_moe_text": 3,
    "qwen3_vl_moe_text": 3,
    "qwen3_vl_text": 3,
}
"""Model types that turn sections of a head by different positions, and how many sections."""


def _section(part: Any, sizes: Any) -> None:
    """Give a config without sections some that fit the small head."""
    number = SECTIONED.get(part.model_type)
    rope = vars(part).get("rope_parameters")
    if number is None or not isinstance(rope, dict) or rope.get("mrope_section"):
        return
    half = int(sizes.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    first = max(1, half // number)
    sections = [first] * (number - 1)
    rope["mrope_section"] = [*sections, half - sum(sections)]


def _fill(fields: dict[str, Any], sizes: Any) -> None:
    """Values for fields that some configs leave open and their models need."""
    for name in ("image_token_id", "image_token_index"):
        if fields.get(name, 0) is None:
            fields[name] = sizes.vocab - len(sizes.tokens) - 1
    if fields.get("is_encoder_decoder"):
        fields.setdefault("pad_token_id", 0)
    if fields.get("image_grid_pinpoints"):
        fields["image_grid_pinpoints"] = [[16, 32]]
    if "sliding_attention" in (fields.get("layer_types") or ()) and not fields.get(
        "sliding_window", 1
    ):
        fields["sliding_window"] = 4
    layer = fields.get("vision_feature_layer")
    if isinstance(layer, list | tuple):
        fields["vision_feature_layer"] = [-1 - number % 2 for number in range(len(layer))]
    if fields.get("head_dim", 0) is None:
        fields["head_dim"] = sizes.head_dim
    if fields.get("num_key_value_heads", 0) is None and "num_attention_heads" in fields:
        fields["num_key_value_heads"] = sizes.kv_heads or sizes.heads
    if fields.get("is_encoder_decoder") and fields.get("decoder_start_token_id") is None:
        fields["decoder_start_token_id"] = fields.get("pad_token_id") or 0


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
    fields["qk_dim_factor"] = 1.0
    fields["mlstm_round_up_to_multiple_of"] = 1
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
    fields["layer_types"] = kinds + kinds
    fields["num_hidden_layers"] = len(fields["layer_types"])
    fields["num_kv_shared_layers"] = len(kinds)
    for name in ("intermediate_size", "activation_sparsity_pattern"):
        if isinstance(fields.get(name), list):
            fields[name] = (fields[name] * len(kinds) * 2)[: 2 * len(kinds)]


def _xmod(fields: dict[str, Any], sizes: Any) -> None:
    fields["default_language"] = fields["default_language"] or fields["languages"][0]


def _dbrx(fields: dict[str, Any], sizes: Any) -> None:
    fields["attn_config"].__dict__.setdefault("rope_theta", 10000.0)


def _deepseek_v2(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_experts_per_tok"] = fields["num_experts_per_tok"] or 2


def _blt(fields: dict[str, Any], sizes: Any) -> None:
    fields["encoder_hash_byte_group_vocab"] = 61
    fields["encoder_hash_byte_group_size"] = [3, 4]


def _roc_bert(fields: dict[str, Any], sizes: Any) -> None:
    fields.update(pronunciation_embed_dim=16, pronunciation_vocab_size=31)
    fields.update(shape_embed_dim=16, shape_vocab_size=31)


def _llama4_vision(fields: dict[str, Any], sizes: Any) -> None:
    fields["intermediate_size"] = round(sizes.hidden / fields["pixel_shuffle_ratio"] ** 2)


def _minimax_m3_vl(fields: dict[str, Any], sizes: Any) -> None:
    fields["merged_hidden_size"] = 4 * sizes.hidden


def _aria(fields: dict[str, Any], sizes: Any) -> None:
    fields["projector_patch_to_query_dict"] = {16: 4}
    fields["max_value_projector_patch_to_query_dict"] = 4


def _chameleon(fields: dict[str, Any], sizes: Any) -> None:
    first = sizes.vocab - len(sizes.tokens) - 9
    names = {f"IMGIMG{chr(ord('A') + n)}Z": first + n for n in range(8)}
    fields["vocabulary_map"] = {"<image>": first + 8, **names}
    fields["image_token_id"] = first + 8
    _quantizer(vars(fields["vq_config"]), sizes)


def _emu3(fields: dict[str, Any], sizes: Any) -> None:
    first = sizes.vocab - len(sizes.tokens) - 9
    names = {f"<|visual token {n:06}|>": first + n for n in range(8)}
    fields["vocabulary_map"] = {"<image>": first + 8, "<|extra_200|>": first - 1, **names}
    fields["image_token_id"] = first + 8
    _quantizer(vars(fields["vq_config"]), sizes)


def _quantizer(fields: dict[str, Any], sizes: Any) -> None:
    for name, value in (
        ("base_channels", 32),
        ("channel_multiplier", (1, 1)),
        ("num_embeddings", 8),
        ("codebook_size", 8),
        ("resolution", 16),
        ("num_res_blocks", 1),
        ("num_patches", 4),
        ("image_token_embed_dim", sizes.hidden),
    ):
        if name in fields:
            fields[name] = type(fields[name])(value)


def _janus(fields: dict[str, Any], sizes: Any) -> None:
    _quantizer(vars(fields["vq_config"]), sizes)


def _diffusion_gemma(fields: dict[str, Any], sizes: Any) -> None:
    for name, value in (("num_experts", 4), ("top_k_experts", 2), ("moe_intermediate_size", 0)):
        fields[name] = fields[name] or value or sizes.intermediate


def _granite4_vision(fields: dict[str, Any], sizes: Any) -> None:
    fields["deepstack_layer_map"] = fields["deepstack_layer_map"] or [(-1, 0)]
    fields["spatial_target_layers"] = [0, 1, 0, 1]
    fields["downsample_rate"] = fields["downsample_rate"] or "1/2"


def _mllama_vision(fields: dict[str, Any], sizes: Any) -> None:
    fields["intermediate_layers_indices"] = [0, 1]
    fields["vision_output_dim"] = 3 * sizes.hidden


def _thinker(fields: dict[str, Any], sizes: Any) -> None:
    fields.setdefault("vision_start_token_id", sizes.vocab - len(sizes.tokens) - 1)


def _sparse_after_dense(fields: dict[str, Any], sizes: Any) -> None:
    fields["num_experts_per_tok"] = fields.get("num_experts_per_tok") or 2
    fields["mlp_layer_types"] = fields["mlp_layer_types"] or ["dense", "sparse"]


def _cohere_compass(fields: dict[str, Any], sizes: Any) -> None:
    rope = fields["rope_parameters"]
    for kind in set(fields["layer_types"]):
        rope.setdefault(kind, {"rope_type": "default", "rope_theta": 10000.0})
        rope[kind].setdefault("mrope_section", [2, 1, sizes.head_dim // 2 - 3])


def _qwen4(fields: dict[str, Any], sizes: Any) -> None:
    for name, value in (
        ("indexer_n_heads", 2),
        ("indexer_kv_heads", 1),
        ("indexer_head_dim", 8),
        ("indexer_budget", 4),
        ("indexer_compress_ratio", 2),
    ):
        if fields[name] is None or fields[name] > value:
            fields[name] = value
    fields["ngram_vocab_size_base"] = 101
    fields["ple_embed_dim"] = 16


_OWN: dict[str, Any] = {
    "aria": _aria,
    "chameleon": _chameleon,
    "cohere_compass_text": _cohere_compass,
    "deepseek_ocr2_text": _sparse_after_dense,
    "diffusion_gemma_text": _diffusion_gemma,
    "emu3": _emu3,
    "granite4_vision": _granite4_vision,
    "janus": _janus,
    "llama4_vision_model": _llama4_vision,
    "mllama_vision_model": _mllama_vision,
    "qwen2_5_omni_thinker": _thinker,
    "qwen3_omni_moe_thinker": _thinker,
    "minimax_m3_vl": _minimax_m3_vl,
    "qwen4_exp_text": _qwen4,
    "unlimited_ocr_text": _sparse_after_dense,
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
