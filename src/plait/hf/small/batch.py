"""An example batch for any model with a head: ids, labels, pictures, encoder and decoder inputs."""

import inspect
from typing import Any

import torch
from torch import nn

from plait.hf.small import pictures as pictures

_FIRST_TOKEN = 10
"""Ordinary tokens begin here; the first few are often special."""


def example_batch(
    model: nn.Module,
    *,
    batch: int = 2,
    length: int = 7,
    seed: int = 0,
    padding: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a model's forward, with labels where it takes them.

    Args:
        model: Usually from `small_model`.
        batch: Number of sequences.
        length: Tokens per sequence, pictures not counted.
        seed: The same seed gives the same batch in every process.
        padding: Give an attention mask whose last sequence has two tokens of padding, on the left.

    Returns:
        Arguments by name. `input_ids` are [batch, length + tokens of pictures].

    Comm: none.
    """
    config: Any = model.config
    draw = torch.Generator().manual_seed(seed)
    takes = set(inspect.signature(model.forward).parameters)
    text = config.get_text_config(decoder=True)
    vocab = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 64))
    ids = _tokens(vocab, (batch, length), draw)
    made = pictures.inputs(model, batch, draw)
    ids, made = _with_pictures(model, ids, made, batch)
    made["input_ids"] = ids
    picture = pictures.token(config)
    made |= _beside(config, takes, made, draw)
    if padding and "attention_mask" in takes:
        mask = torch.ones_like(ids)
        mask[-1, :2] = 0
        made["attention_mask"] = mask
    if "labels" in takes:
        labels = ids.masked_fill(ids == picture, -100) if picture is not None else ids
        if getattr(config, "is_encoder_decoder", False):
            labels = _tokens(vocab, (batch, length), draw)
        elif "attention_mask" in made:
            labels = labels.masked_fill(made["attention_mask"] == 0, -100)
        made["labels"] = labels
    codebooks = getattr(text, "num_codebooks", 0)
    if config.model_type.startswith("musicgen") and codebooks:
        made["input_ids"] = ids.repeat_interleave(codebooks, 0)
        made["labels"] = ids.unsqueeze(-1).repeat(1, 1, codebooks)
    return made


def _beside(
    config: Any, takes: set[str], made: dict[str, Any], draw: torch.Generator
) -> dict[str, Any]:
    """What some models ask for beside ids and pictures: which tokens are which, and where."""
    ids, token = made["input_ids"], pictures.token(config)
    picture = -1 if token is None else token
    more: dict[str, Any] = {}
    if "mm_token_type_ids" in takes:
        more["mm_token_type_ids"] = (ids == picture).long()
    if "image_attention_mask" in takes and "pixel_values" in made:
        more["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
    if "bbox" in takes:
        more["bbox"] = torch.rand(*ids.shape, 4, generator=draw, dtype=torch.float64).sort(-1)[0]
    if "image_embeds_position_mask" in takes and "pixel_values" in made:
        mask = torch.zeros_like(ids)
        mask[:, 1 : 1 + config.latent_query_num] = 1
        more["image_embeds_position_mask"] = mask
    if "cross_attention_mask" in takes and "aspect_ratio_mask" in made:
        tiles = made["aspect_ratio_mask"].shape[-1]
        more["cross_attention_mask"] = torch.ones(*ids.shape, 1, tiles, dtype=torch.long)
    if "token_type_ids" in takes and "pixel_values" in made:
        more["token_type_ids"] = (ids == picture).long()
    return more


def _with_pictures(
    model: nn.Module, ids: torch.Tensor, made: dict[str, Any], batch: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ids with as many tokens of the picture after the third as the picture has.

    A model whose vision part does not take the pictures made here gets text alone.
    """
    picture = pictures.token(model.config)
    if not made:
        return ids, made
    try:
        count = pictures.tokens_per_picture(model, made, batch)
    except Exception:
        return ids, {}
    if picture is None or count == 0:
        return ids, made
    start = getattr(model.config, "vision_start_token_id", None)
    before = [torch.full((batch, 1), start)] if isinstance(start, int) else []
    tokens = torch.full((batch, count), picture)
    return torch.cat([ids[:, :3], *before, tokens, ids[:, 3:]], dim=1), made


def _tokens(vocab: int, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Ordinary tokens: not the first few of a vocabulary and not the last."""
    end = max(_FIRST_TOKEN + 1, vocab - 40)
    return torch.randint(_FIRST_TOKEN, end, shape, generator=draw)
