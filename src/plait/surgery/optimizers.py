"""Optimizers that hold parameters which have been replaced."""

import gc
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_log = logging.getLogger("plait")


def optimizers_of(params: Mapping[int, Any]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in this process that hold one of some parameters.

    Args:
        params: By their ids.
    """
    for held in gc.get_objects():
        if issubclass(type(held), torch.optim.Optimizer) and any(
            id(param) in params
            for group in held.__dict__.get("param_groups", ())
            for param in group["params"]
        ):
            yield held


def tell_optimizers(made: Mapping[int, nn.Parameter]) -> None:
    """Give optimizers the new parameters in the place of those they hold.

    Args:
        made: Id of a parameter that was replaced → what replaced it. Those that were must still
            exist.
    """
    for held in optimizers_of(made) if made else ():
        for group in held.param_groups:
            params = group["params"]
            for position, param in enumerate(params):
                if id(param) in made:
                    params[position] = made[id(param)]
                    if held.state.pop(param, None):
                        _log.warning(
                            "%s had a state for a parameter that is now a DTensor: it is dropped, "
                            "and the optimizer starts anew for this parameter. Adopt new modules "
                            "before the first step (plait.adopt(model)).",
                            type(held).__name__,
                        )
