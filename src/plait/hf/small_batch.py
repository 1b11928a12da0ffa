"""An example batch for any model with a head: ids, labels, pictures, encoder and decoder inputs."""

import inspect
from typing import Any

import torch
from torch import nn

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
    made: dict[str, Any] = {"input_ids": ids}
    if padding and "attention_mask" in takes:
        mask = torch.ones_like(ids)
        mask[-1, :2] = 0
        made["attention_mask"] = mask
    if "labels" in takes:
        labels = ids
        if getattr(config, "is_encoder_decoder", False):
            labels = _tokens(vocab, (batch, length - 1), draw)
        elif "attention_mask" in made:
            labels = ids.masked_fill(made["attention_mask"] == 0, -100)
        made["labels"] = labels
    return made


def _tokens(vocab: int, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Ordinary tokens: not the first few of a vocabulary and not the last."""
    end = max(_FIRST_TOKEN + 1, vocab - 40)
    return torch.randint(_FIRST_TOKEN, end, shape, generator=draw)
