"""Small models of many architectures, all of whose sizes divide by 2, 3 and 4.

| size | value |
|---|---|
| query heads × head width | 24 × 4 = 96, the hidden width |
| key/value heads | 12 (two query heads share one) |
| MLP width | 48 |
| vocabulary | 96 |
| layers | 2 |

`tiny.config("llama", num_key_value_heads=6)` changes any of them.
"""

from typing import Any

import torch
from torch import nn

from plait.errors import PlaitError
from plait.run import seeds

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields that all language models here share."""

OWN: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 4, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 4, "tie_word_embeddings": False},
    # One layer with a window shorter than the batch, one that sees everything.
    "gemma3_text": {
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "mistral": {"head_dim": 4, "sliding_window": 4},
    "glm4": {"head_dim": 4},
    "cohere": {"use_qk_norm": False},
    "starcoder2": {"use_bias": True, "sliding_window": None, "tie_word_embeddings": False},
}
"""Fields per architecture, on top of `SIZES`; the keys are transformers' model types."""

VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 48,
}
"""The image encoder of "llava"."""

NAMES = (*OWN, "llava", "mlp")
"""What `model` can build; "mlp" is no transformers model."""

_IMAGE_TOKEN = 95


class Mlp(nn.Module):
    """Two linear layers with biases and a residual: an `nn.Module` that transformers never saw."""

    def __init__(self, hidden: int = 96, width: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.act = nn.GELU()
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x + down(act(up(x)))`, any leading dimensions."""
        hidden: torch.Tensor = self.down(self.act(self.up(x)))
        return x + hidden


MLP_PLAN = {"up": "colwise", "down": "rowwise"}
"""The tensor-parallel plan of "mlp", which brings none of its own."""


def config(name: str, **overrides: Any) -> Any:
    """A small transformers config.

    Args:
        name: One of `NAMES` except "mlp".
        **overrides: Fields that differ; for "llava" those of its text model.

    Raises:
        PlaitError: There is no such model here.
    """
    if name == "llava":
        return _llava_config(overrides)
    if name not in OWN:
        raise PlaitError(f"a tiny {name} config", f"there are {', '.join([*OWN, 'llava'])}")
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **{**SIZES, **OWN[name], **overrides})


def model(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> nn.Module:
    """A small model with seeded weights, the same on all ranks, in evaluation mode.

    Args:
        name: One of `NAMES`.
        dtype: Of the parameters.
        seed: Of the initial weights; the process's generators are left as they are.
        **overrides: Fields of the config that differ (for "mlp": hidden, width).
    """
    with seeds.borrowed(seed):
        if name == "mlp":
            return Mlp(**overrides).to(dtype).eval()
        return from_config(config(name, **overrides), dtype)


def from_config(config: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with a head that a config of this module describes."""
    import transformers

    family = (
        transformers.AutoModelForImageTextToText
        if config.model_type == "llava"
        else transformers.AutoModelForCausalLM
    )
    made: nn.Module = family.from_config(config, dtype=dtype)
    return made.eval()


def batch(
    name: str,
    *,
    size: int = 2,
    length: int = 7,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    padded: bool = False,
) -> dict[str, torch.Tensor]:
    """A batch for `model(name)`: ids and labels, for "llava" an image, for "mlp" an `x`.

    Args:
        name: One of `NAMES`.
        size: Number of sequences.
        length: Tokens per sequence.
        seed: The same seed gives the same batch on all ranks.
        dtype: Of `x` and of the images.
        padded: Leave the first two tokens of the last sequence to padding.
    """
    draw = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return {"x": torch.randn(size, length, 96, generator=draw, dtype=torch.float64).to(dtype)}
    ids = torch.randint(3, _IMAGE_TOKEN, (size, length), generator=draw)
    made = {"input_ids": ids}
    if name == "llava":
        image_tokens = torch.full((size, 4), _IMAGE_TOKEN)  # 2 × 2 patches
        made["input_ids"] = torch.cat([ids[:, :1], image_tokens, ids[:, 1:]], dim=1)
        made["pixel_values"] = torch.randn(size, 3, 8, 8, generator=draw).to(dtype)
    made["labels"] = made["input_ids"].masked_fill(made["input_ids"] == _IMAGE_TOKEN, -100)
    if padded:
        mask = torch.ones_like(made["input_ids"])
        mask[-1, :2] = 0
        made["attention_mask"] = mask
        made["labels"] = made["labels"].masked_fill(mask == 0, -100)
    return made


def _llava_config(overrides: dict[str, Any]) -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig

    return LlavaConfig(
        text_config=config("llama", **overrides),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_id=_IMAGE_TOKEN,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
