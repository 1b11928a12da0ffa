"""Random numbers of group rank 0 on every rank of the group, for the length of one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

# Generator states by device type, the CPU's and that of the model's device.
RandomStates: TypeAlias = dict[str, torch.Tensor]


def capture(device: torch.device) -> RandomStates:
    """The state of the CPU generator, and of `device`'s own where it has one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: RandomStates, device: torch.device) -> None:
    """Sets the generators to the `states` that `capture` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def borrowed(states: RandomStates | None, device: torch.device) -> Iterator[None]:
    """Draws from another rank's random numbers inside, and from this rank's own afterwards.

    Args:
        states: What group rank 0 captured; `None` on group rank 0 itself, whose generators simply
            advance, exactly as in one process.
        device: The device of the model.
    """
    if states is None:
        yield
        return
    own = capture(device)
    restore(states, device)
    try:
        yield
    finally:
        restore(own, device)
