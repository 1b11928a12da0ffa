"""Whether a gradient that a backward receives is nobody else's, so that it need not be copied.

Autograd hands out gradients as they are: the sum of two parameters gives both the same tensor, a
view gives a view of what another one keeps, and `out.backward(g)` may give the caller's `g`. A
gradient that becomes a parameter's `.grad` is added to later, so it must not be shared.

There is no question to ask a tensor for its owner, only counts of those who hold it: its Python
object, the tensor behind it, its storage, and, where it is a view, its base. What they are for a
tensor that nobody else holds depends on the versions of Python and torch, so they are taken from
gradients that are known to be new. Whatever differs from these has another holder.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from plait.comm.once import first_order
from plait.run import torch_private

Holders = tuple[int, ...]


def holders(x: Tensor) -> Holders:
    """How many hold `x` and its memory, as counted from here.

    Only comparable between backwards of the same form, since every variable of the caller counts.
    """
    storage = x.untyped_storage()
    counts = (
        sys.getrefcount(x),
        x._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storage),
        torch_private.storage_holders(storage),
        # Memory that torch has not allocated (an array of numpy, shared memory), or only a part.
        storage.resizable(),
        storage.nbytes() == x.numel() * x.element_size(),
    )
    base = x._base
    if base is None:
        return counts
    return (*counts, sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


class _New(Function):
    """Its backward has the form of those that ask, and notes what they count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Holders]) -> Tensor:
        ctx.seen = seen
        return x.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.seen.append(holders(grad))
        return None, None


@cache
def counts_of_new() -> frozenset[Holders]:
    """What `holders` counts for gradients that are new: a whole tensor, and a view of one.

    The view is a matrix product transposed, which is how the gradient of a linear layer's weight
    arrives.
    """
    found = set()
    # Whatever the caller's modes are, real tensors and a recorded graph; and nothing of it is
    # what a checkpoint around counts as saved in the forward.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), unseen:
        for is_view in (False, True):
            seen: list[Holders] = []
            for _ in range(20):  # the interpreter may hold more before it has warmed up
                x = torch.ones(2, 3, device="cpu", requires_grad=True)
                factor = torch.ones(2 + 2 * is_view, 3, device="cpu")
                out: Tensor = _New.apply(x, seen)  # type: ignore[no-untyped-call]
                y = factor @ out.t() if is_view else out * factor
                y.sum().backward()
            found.add(min(seen))
    return frozenset(found)
