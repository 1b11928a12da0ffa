"""Rules of our own for parts that transformers ships without a plan.

A vision-language model ships rules for its language model; its image encoder would stay whole on
every rank. The encoders here consist of the same two pairs of linear layers, so the same two pairs
of styles split them.
"""

from typing import Any

from torch import nn

_ENCODER_ATTENTION = {
    "encoder.layers.*.self_attn.q_proj": "colwise",
    "encoder.layers.*.self_attn.k_proj": "colwise",
    "encoder.layers.*.self_attn.v_proj": "colwise",
    "encoder.layers.*.self_attn.out_proj": "rowwise",
}
_ENCODER_MLP = {
    "encoder.layers.*.mlp.fc1": "colwise",
    "encoder.layers.*.mlp.fc2": "rowwise",
}
_ENCODERS = ("clip_vision_model", "siglip_vision_model")
"""Model types, as their configs name them, that these rules fit."""


def missing_rules(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Rules for parts of `model` that ship none.

    Args:
        model: A model of transformers, or any module (which has no such part).
        num_ranks: Ranks to split over. Attention whose heads do not divide by it stays whole.

    Returns:
        Name pattern → style.
    """
    rules: dict[str, str] = {}
    inside: list[str] = []
    for name, part in model.named_modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "model_type", None) not in _ENCODERS or getattr(part, "_tp_plan", None):
            continue
        if any(name.startswith(outer) for outer in inside) or not hasattr(part, "encoder"):
            continue
        prefix = f"{name}." if name else ""
        inside.append(prefix)
        divides = config.num_attention_heads % num_ranks == 0
        found = _ENCODER_MLP | (_ENCODER_ATTENTION if divides else {})
        rules |= {prefix + pattern: style for pattern, style in found.items()}
    return rules
