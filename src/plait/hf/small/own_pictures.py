"""What small copies of models with pictures or sounds need beyond the rules that hold for all.

Every function sets fields of one config; it gets the sizes of the small copy.
"""

from typing import Any


def _llama4_vision(fields: dict[str, Any], sizes: Any) -> None:
    fields["intermediate_size"] = round(sizes.hidden / fields["pixel_shuffle_ratio"] ** 2)


def _minimax_m3_vl(fields: dict[str, Any], sizes: Any) -> None:
    fields["merged_hidden_size"] = 4 * sizes.hidden


def _merged_four(fields: dict[str, Any], sizes: Any) -> None:
    fields["out_hidden_size"] = 4 * sizes.hidden


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


def _granite_speech(fields: dict[str, Any], sizes: Any) -> None:
    fields["context_size"] = 8


def _windowed(fields: dict[str, Any], sizes: Any) -> None:
    fields["sliding_window"] = fields["sliding_window"] or 4


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


def _florence_vision(fields: dict[str, Any], sizes: Any) -> None:
    stages = len(fields["embed_dim"])
    fields["embed_dim"] = (sizes.hidden,) * stages
    fields["num_heads"] = fields["num_groups"] = (sizes.heads,) * stages
    fields["depths"] = (1,) * stages


OWN: dict[str, Any] = {
    "aria": _aria,
    "chameleon": _chameleon,
    "cohere_compass_text": _cohere_compass,
    "deepseek_ocr2_text": _sparse_after_dense,
    "diffusion_gemma_text": _diffusion_gemma,
    "emu3": _emu3,
    "florence_vision": _florence_vision,
    "granite4_vision": _granite4_vision,
    "granite_speech_encoder": _granite_speech,
    "granite_speech_plus_encoder": _granite_speech,
    "janus": _janus,
    "llama4_vision_model": _llama4_vision,
    "minimax_m3_vl": _minimax_m3_vl,
    "mllama_vision_model": _mllama_vision,
    "muse_glimmer": _merged_four,
    "muse_spark": _merged_four,
    "qwen2_5_omni_thinker": _thinker,
    "qwen3_omni_moe_thinker": _thinker,
    "qwen4_exp_text": _qwen4,
    "step3p5": _windowed,
    "unlimited_ocr_text": _sparse_after_dense,
}
"""Model type → what its small config needs."""
