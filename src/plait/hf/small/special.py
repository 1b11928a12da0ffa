"""What small copies of single model types need beyond the rules that hold for all."""

from collections.abc import Iterator
from typing import Any

from plait.hf.small import own_pictures, own_text

OWN = own_text.OWN | own_pictures.OWN
"""Model type → what its small config needs."""


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
        own = OWN.get(getattr(part, "model_type", ""))
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
        fields["pad_token_id"] = fields.get("pad_token_id") or 0
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
