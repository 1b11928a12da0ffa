"""Seeded noise on parameters, so that zero biases and unit norms hide nothing."""

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.errors import PlaitError


@torch.no_grad()
def add_noise(module: nn.Module, scale: float = 0.1, seed: int = 0) -> nn.Module:
    """Add normal noise to every parameter, biases and norms included, in place.

    Each parameter's noise depends on the seed and on its name only: it is the same on all ranks,
    and the same for a parameter that two models share a name for. Tied parameters get it once. No
    generator of the process is touched.

    Args:
        module: A module that is not split yet.
        scale: Standard deviation of the noise.
        seed: Different seeds give different noise.

    Returns:
        The same module.

    Raises:
        PlaitError: A parameter is a DTensor; add the noise before splitting.

    Comm: none.
    """
    split = [name for name, x in module.named_parameters() if isinstance(x, DTensor)]
    if split:
        raise PlaitError(
            "noise on the parameters of a model",
            f"{len(split)} of them are split already, the first is {split[0]}",
            "add the noise before plait.parallelize",
        )
    for name, x in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x.add_((noise * scale).to(x.dtype).to(x.device))
    return module
