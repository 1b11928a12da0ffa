"""A backward that has no backward of its own, and says so."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.errors import PlaitError

Backward = Callable[..., Any]


def first_order(backward: Backward) -> Backward:
    """Run a backward without recording it; refuse where its gradient would be asked for.

    torch's own `once_differentiable` raises only when the second derivative is taken *through* the
    function. Asked for the inputs before it, torch finds no path and silently leaves the term out.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and any(grad.requires_grad for grad in grads):
            raise PlaitError(
                "the gradient of a gradient (create_graph=True) through a collective",
                "the collectives of plait.comm have first derivatives only",
                "compute the term that needs second derivatives in one process",
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return checked
