"""Pictures and sounds of an example batch, and how many tokens of text they stand for."""

import inspect
from typing import Any

import torch
from torch import nn

_TOKEN_FIELDS = ("image_token_id", "image_token_index", "image_patch_id")
_SIZED = ("cohere2_vision", "emu3", "lighton_ocr", "mistral3", "mistral_large4")
_SIDE = 4
"""Patches along each side of a picture."""


def inputs(model: nn.Module, batch: int, draw: torch.Generator) -> dict[str, Any]:
    """Arguments with one random picture per sequence; none for a model that takes none."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    special = _OWN.get(config.model_type)
    if special is not None:
        made = special(config, batch, draw)
    elif "image_grid_thw" in takes:
        made = _patches_in_a_grid(config, batch, draw)
    elif "pixel_values" in takes:
        made = _whole_pictures(config, batch, draw)
        if "image_sizes" in takes and config.model_type in _SIZED:
            side = made["pixel_values"].shape[-1]
            made["image_sizes"] = torch.tensor([[side, side]] * batch)
    else:
        made = {}
    dtype = next(model.parameters()).dtype
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}


def token(config: Any) -> int | None:
    """The token that stands for a piece of a picture."""
    for name in _TOKEN_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


@torch.no_grad()
def tokens_per_picture(model: nn.Module, made: dict[str, Any], batch: int) -> int:
    """How many tokens one picture becomes, as the model's own vision part says."""
    owner: Any = getattr(model, "model", model)
    if not hasattr(owner, "get_image_features"):
        owner = model
    if not hasattr(owner, "get_image_features"):
        return 0
    takes = inspect.signature(owner.get_image_features).parameters
    found = owner.get_image_features(**{k: v for k, v in made.items() if k in takes})
    for name in ("pooler_output", "image_embeds", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            found = getattr(found, name)
            break
    return _rows(found) // batch


def _rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return features.numel() // max(1, features.shape[-1])
    return sum(_rows(one) for one in features)


def _vision(config: Any) -> Any:
    for name in ("vision_config", "encoder", "vision", "vq_config"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _whole_pictures(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    vision = _vision(config)
    side = _number(vision, "image_size", "resolution", default=16)
    channels = _number(vision, "num_channels", "in_channels", default=3)
    return {"pixel_values": torch.randn(batch, channels, side, side, generator=draw)}


def _several_pictures(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _whole_pictures(config, batch, draw)
    return {"pixel_values": made["pixel_values"].unsqueeze(1)}


def _tiles(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    """One picture of one tile, cut by the configs' only grid into two, with an overview."""
    one = _whole_pictures(config, batch * 3, draw)["pixel_values"]
    side = one.shape[-1]
    return {
        "pixel_values": one.view(batch, 3, *one.shape[1:]),
        "image_sizes": torch.tensor([[side, 2 * side]] * batch),
    }


def _high_and_low(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _whole_pictures(config, batch, draw)
    side = config.high_res_vision_config.image_size
    made["high_res_pixel_values"] = torch.randn(batch, 3, side, side, generator=draw)
    return made


def _mllama(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    vision = config.vision_config
    tiles, side = vision.max_num_tiles, vision.image_size
    return {
        "pixel_values": torch.randn(batch, 1, tiles, 3, side, side, generator=draw),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
    }


def _flat_patches(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    width = config.vision_config.patch_embed_hidden_size
    places = torch.arange(6).view(1, 6, 1).expand(batch, 6, 2) % 3 + 1
    patches = torch.randn(batch, 6, width, generator=draw)
    return {"flattened_patches": torch.cat([places.to(patches.dtype), patches], dim=2)}


def _with_questions(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _whole_pictures(config, batch, draw)
    made["qformer_input_ids"] = torch.randint(3, 90, (batch, 5), generator=draw)
    return made


def _frames_with_questions(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _with_questions(config, batch, draw)
    return made | {"pixel_values": made["pixel_values"].unsqueeze(1).repeat(1, 2, 1, 1, 1)}


def _patches_in_a_grid(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    vision = _vision(config)
    patch = _number(vision, "patch_size", default=4)
    frames = _number(vision, "temporal_patch_size", "patch_temporal", default=1)
    channels = _number(vision, "in_channels", "in_chans", "num_channels", default=3)
    rows = batch * _SIDE * _SIDE
    width = channels * frames * patch * patch
    return {
        "pixel_values": torch.randn(rows, width, generator=draw),
        "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * batch),
    }


def _patches_as_pictures(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _patches_in_a_grid(config, batch, draw)
    patch = _number(_vision(config), "patch_size", default=4)
    made["pixel_values"] = made["pixel_values"].view(len(made["pixel_values"]), -1, patch, patch)
    return made


def _grid_with_merging(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    made = _patches_in_a_grid(config, batch, draw)
    return made | {"image_merge_sizes": torch.full((batch,), 2)}


def _padded_patches(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    patch = _number(config.vision_config, "patch_size", default=4)
    places = _SIDE * _SIDE
    return {
        "pixel_values": torch.randn(batch, places, 3 * patch * patch, generator=draw),
        "pixel_attention_mask": torch.ones(batch, places, dtype=torch.long),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE]] * batch),
    }


def _flat_with_sizes(config: Any, batch: int, draw: torch.Generator) -> dict[str, Any]:
    patch = _number(config.vision_config, "patch_size", default=4)
    strip = torch.randn(1, 3, patch, batch * _SIDE * _SIDE * patch, generator=draw)
    return {"pixel_values": strip, "target_sizes": torch.tensor([[_SIDE, _SIDE]] * batch)}


_OWN: dict[str, Any] = {
    "minicpm_ocr": _flat_with_sizes,
    "minicpmv4_6": _flat_with_sizes,
    "minicpmv4_7": _flat_with_sizes,
    "lfm2_vl": _padded_patches,
    "video_llama_3": _grid_with_merging,
    "deepseek_vl_hybrid": _high_and_low,
    "idefics": _several_pictures,
    "instructblip": _with_questions,
    "instructblipvideo": _frames_with_questions,
    "mllama": _mllama,
    "pix2struct": _flat_patches,
    "idefics2": _several_pictures,
    "idefics3": _several_pictures,
    "smolvlm": _several_pictures,
    "llava_next": _tiles,
    "llava_next_video": _tiles,
    "llava_onevision": _tiles,
    "kimi_k25": _patches_as_pictures,
    "paddleocr_vl": _patches_as_pictures,
    "granite4_vision": _tiles,
}
