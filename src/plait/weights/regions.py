"""Sub-blocks of tensors: a region names, for each dimension, the index ranges that are wanted.

A rank's share of one parameter is cut along one dimension, but pushed down through a transposed or
narrowed recipe it can be cut along several, so the readers work on regions.
"""

import itertools

import torch
from torch import Tensor

from plait.plan.intervals import Pieces, joined, length

Region = tuple[Pieces | None, ...]
"""The wanted pieces along each dimension; None is the whole dimension."""

_MANY_PIECES = 8


def along(ndim: int, dim: int | None, pieces: Pieces) -> Region:
    """Returns the region of a tensor of `ndim` dimensions that is cut along `dim` only."""
    if dim is None:
        return (None,) * ndim
    dim = dim % ndim
    return (*(None,) * dim, joined(pieces), *(None,) * (ndim - dim - 1))


def shape_in(shape: tuple[int, ...], region: Region) -> tuple[int, ...]:
    """Returns the shape of `region` of a tensor of `shape`."""
    return tuple(
        size if pieces is None else length(pieces)
        for size, pieces in zip(shape, region, strict=True)
    )


def with_pieces(region: Region, dim: int, pieces: Pieces | None) -> Region:
    """Returns `region` with other pieces along `dim`."""
    return (*region[:dim], pieces, *region[dim + 1 :])


def copy_region(x: Tensor, region: Region, out: Tensor) -> None:
    """Copies a region of `x` into `out`, cast on the way.

    Args:
        x: The whole tensor, often a view of a mapped file: only the wanted elements are touched.
        region: What to copy.
        out: Any strides, dtype and device; its shape is that of the region.
    """
    for dim, pieces in enumerate(region):
        if pieces is not None and len(pieces) > _MANY_PIECES:
            # One gather is cheaper than thousands of small copies.
            rows = torch.cat([torch.arange(a, b, device=x.device) for a, b in pieces])
            x = x.index_select(dim, rows)
            region = with_pieces(region, dim, None)
    cuts = []
    for dim, pieces in enumerate(region):
        if pieces is not None:
            ends = list(itertools.accumulate(b - a for a, b in pieces))
            cuts.append([(dim, a, b, end) for (a, b), end in zip(pieces, ends, strict=True)])
    for cut in itertools.product(*cuts):
        source, target = x, out
        for dim, a, b, end in cut:
            source = source.narrow(dim, a, b - a)
            target = target.narrow(dim, end - (b - a), b - a)
        target.copy_(source)
