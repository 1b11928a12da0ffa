"""Small copies of models: the same class and structure, a few layers of each kind, tiny widths.

A small copy shows whether a plan is right for an architecture without the memory of the model: it
has all kinds of layers, the same ratios of heads and the same special cases in its code.
"""

import contextlib
import copy
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from plait.hf.small import special
from plait.hf.small.batch import example_batch
from plait.hf.small.sizes import Sizes, choose, shrink_tree
from plait.run import seeds

__all__ = ["example_batch", "quiet", "small_config", "small_model"]


def small_config(
    config: Any,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    layers_per_kind: int = 1,
) -> Any:
    """A shrunk deep copy of a transformers config: same class, same structure.

    Args:
        config: The config of any model; parts inside it (text, vision, …) are shrunk with it.
        heads: Query heads of all attention; None keeps the ratio to the key/value heads.
        kv_heads: Key/value heads of all attention that has its own; None keeps the ratio.
        intermediate: Width of MLPs and experts; None chooses a multiple of 12.
        layers_per_kind: Layers to keep of each kind. Two is the least in all.

    Returns:
        The small config. Its dropouts are 0 and its special tokens are inside the vocabulary.

    Comm: none.
    """
    small = copy.deepcopy(config)
    sizes: Sizes = choose(small, heads, kv_heads, intermediate, layers_per_kind)
    shrink_tree(small, sizes)
    special.mend(small, sizes)
    return small


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers does not comment on the odd config and inputs of a small copy."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def small_model(
    model_class: Any, config: Any, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    """A model with seeded weights and noise on every parameter, in evaluation mode.

    Args:
        model_class: A model class of transformers, or one of its auto classes.
        config: Usually from `small_config`; not changed.
        dtype: Of the parameters.
        seed: The same seed gives the same weights in every process.

    Returns:
        The model. Zero biases and unit norms are not zero or one in it, so mistakes show.

    Comm: none.
    """
    config = copy.deepcopy(_own_config(model_class, config))
    for part in special.parts(config):
        part._experts_implementation = "eager"
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with seeds.borrowed(seed):
        model: nn.Module = make(config, dtype=dtype)
    model = model.to(dtype).eval()
    add_noise(model, seed)
    return model


def _own_config(model_class: Any, config: Any) -> Any:
    """The part of a config that a class is made from: a text model's own, of a larger model."""
    wanted = getattr(model_class, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in special.parts(config) if isinstance(part, wanted)), config)


@torch.no_grad()
def add_noise(model: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Add normal noise to every parameter; it depends on the seed and the parameter's name."""
    for name, x in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x.copy_(torch.nan_to_num(x) + (noise * scale).to(x.dtype))
