"""The shared border of one tensor: what `copy_to` made of it, kept on the tensor itself.

The entry lives on the input tensor, so it ends with it and there is no table to clean up. No
reference cycle arises: the border's graph node leads to the node that produced the input, not to
the input. The exception is a leaf that requires grad, whose AccumulateGrad node holds the leaf:
nothing is kept there.

A border stands for a tensor's values and for its place in the graph. Either can be exchanged under
the same tensor object (`x.add_()`, `x.data = …`, `x.set_()`, `x.detach_().requires_grad_()`), and
then the next caller gets a new border.
"""

import collections
from typing import Any

import torch
from torch import Tensor

from plait.comm.arguments import is_imaginary
from plait.comm.group import Group

_ATTRIBUTE = "_plait_border"


class _Borders:
    """The borders of one tensor in one state, one per group it was handed to.

    Attributes:
        version: The tensor's version. An operation in place raises it, of a border as well (they
            share memory and counter), and with it autograd gives up the borders made before.
        node: The graph node that produced the tensor.
        output_nr: Which of the node's results it is.
        entries: The groups with their borders.
        serves_views: Whether a reshaped view of the tensor takes its part of the same border.
    """

    __slots__ = ("entries", "node", "output_nr", "serves_views", "version")

    def __init__(self, x: Tensor) -> None:
        self.version = x._version
        # A border leads to this node anyway, so holding it keeps nothing alive for longer.
        self.node = x.grad_fn
        self.output_nr = x.output_nr
        self.entries: list[tuple[Group, Tensor]] = []
        self.serves_views = False

    def hold_for(self, x: Tensor) -> bool:
        """Whether `x` is where it was in the graph, and has not been modified since."""
        return (
            self.version == x._version
            and self.node is x.grad_fn
            and self.output_nr == x.output_nr
            and not x.is_leaf
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save writes a tensor's attributes. This one means nothing elsewhere; an empty
        # OrderedDict is what torch.load(weights_only=True) accepts, and find_border ignores it.
        return (collections.OrderedDict, ())


def find_border(x: Tensor, group: Group) -> Tensor | None:
    """The border of `x` to `group`, if there is one and `x` is still what it was made of."""
    borders = x.__dict__.get(_ATTRIBUTE)
    if type(borders) is not _Borders or not borders.hold_for(x):
        return None
    for owner, border in borders.entries:
        if owner is group:
            return border if _same_memory(border, x) else None
    return None


def find_border_of_view(x: Tensor, group: Group) -> Tensor | None:
    """The border of the tensor that `x` is a reshaped view of, reshaped as `x`."""
    base = x._base
    if base is None or x.is_leaf or x.numel() != base.numel() or x.dtype != base.dtype:
        return None
    borders = base.__dict__.get(_ATTRIBUTE)
    if type(borders) is not _Borders or not borders.serves_views:
        return None
    border = find_border(base, group)
    if border is None or not (x.is_contiguous() and base.is_contiguous()):
        return None
    return border.view(x.shape)


def keep_border(x: Tensor, group: Group, border: Tensor, *, serves_views: bool = False) -> None:
    """Remember `border` for the next caller with the same tensor object."""
    # Inference tensors have no version, so what is done to them would go unnoticed.
    if x.is_leaf or x.is_inference() or x.layout is not torch.strided:
        return
    borders = x.__dict__.get(_ATTRIBUTE)
    if type(borders) is not _Borders or not borders.hold_for(x):
        borders = x.__dict__[_ATTRIBUTE] = _Borders(x)
    borders.entries = [entry for entry in borders.entries if entry[0] is not group]
    borders.entries.append((group, border))
    borders.serves_views = borders.serves_views or serves_views


def _same_memory(border: Tensor, x: Tensor) -> bool:
    """Whether `x` still is the memory that `border` shows."""
    if border.dtype != x.dtype:
        return False
    return border.shape == x.shape if is_imaginary(x) else border.is_set_to(x)
