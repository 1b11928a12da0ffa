"""The shared border of one tensor: what `copy_to` made of it, kept on the tensor itself.

The entry lives on the input tensor, so it ends with it and there is no table to clean up. No
reference cycle arises: the border's graph node leads to the node that produced the input, not to
the input. The exception is a leaf that requires grad, whose AccumulateGrad node holds the leaf:
nothing is kept there.
"""

import collections
from typing import Any

from torch import Tensor

from plait.comm.group import Group

_ATTRIBUTE = "_plait_border"


class _Borders:
    """The borders of one tensor at one version, one per group it was handed to."""

    __slots__ = ("entries", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.entries: list[tuple[Group, Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save writes a tensor's attributes. This one means nothing elsewhere; an empty
        # OrderedDict is what torch.load(weights_only=True) accepts, and find_border ignores it.
        return (collections.OrderedDict, ())


def find_border(x: Tensor, group: Group) -> Tensor | None:
    """The border of `x` to `group`, if there is one and `x` has not been modified since."""
    borders = x.__dict__.get(_ATTRIBUTE)
    if type(borders) is not _Borders or borders.version != x._version:
        return None
    for owner, border in borders.entries:
        if owner is group:
            return border
    return None


def keep_border(x: Tensor, group: Group, border: Tensor) -> None:
    """Remember `border` for the next caller with the same tensor object."""
    if x.is_leaf:
        return
    borders = x.__dict__.get(_ATTRIBUTE)
    if type(borders) is not _Borders or borders.version != x._version:
        borders = _Borders(x._version)
        x.__dict__[_ATTRIBUTE] = borders
    borders.entries.append((group, border))
