"""Collectives on one mesh axis without autograd. Results are new tensors.

Every function takes the same arguments on every rank but for the data. Ranks are group ranks.
For a group of one rank there is nothing to do and `x` itself comes back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import counting
from plait.comm.group import Group, group_of, transport_of
from plait.comm.sizes import chunk_sizes, normal_dim
from plait.comm.transport import Op
from plait.errors import RankError


def all_reduce(x: Tensor, mesh: DeviceMesh, op: Op = "sum") -> Tensor:
    """The sum (or maximum) of every rank's `x`, bit-equal on all ranks.

    16-bit floats are added in float32 and rounded once where the CPU does the sum.

    Args:
        x: This rank's term, of the same shape and dtype on every rank.
        mesh: The axis, a 1-D mesh.
        op: "sum" or "max".

    Returns:
        The reduction, of `x`'s shape, contiguous.

    Raises:
        RankError: A rank asked for something else, died, or did not come in time.

    Comm:
        One all-reduce of `x`'s bytes.
    """
    group = group_of(mesh)
    if group.size == 1:
        return x
    if counting.is_counting():
        counting.record("all_reduce", x.numel() * x.element_size())
    return transport_of(group).all_reduce(x.detach(), op, None)


def all_reduce_(x: Tensor, mesh: DeviceMesh, op: Op = "sum") -> Tensor:
    """As [`all_reduce`][plait.comm.all_reduce], but the result takes `x`'s memory.

    Only for a tensor that nobody else holds, such as the fresh output of a matrix product.

    Args:
        x: This rank's term; overwritten.
        mesh: The axis, a 1-D mesh.
        op: "sum" or "max".

    Returns:
        `x`, holding the reduction.

    Raises:
        RankError: A rank asked for something else, died, or did not come in time.

    Comm:
        One all-reduce of `x`'s bytes.
    """
    group = group_of(mesh)
    if group.size == 1:
        return x
    if counting.is_counting():
        counting.record("all_reduce", x.numel() * x.element_size())
    out = x.detach()
    transport_of(group).all_reduce(out, op, out)
    return x


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's `x` in rank order along `dim`.

    Args:
        x: This rank's piece; the pieces differ at most along `dim` and may be empty.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension the pieces lie along.
        sizes: Extent along `dim` of every rank's piece. Without it the ranks tell each other,
            which costs nothing on the link of one host and one more small message elsewhere.

    Returns:
        The whole, `sum(sizes)` long along `dim`.

    Raises:
        RankError: The pieces do not fit together, or a rank died or did not come in time.

    Comm:
        One all-gather of the whole's bytes.
    """
    return all_gather_sized(x, mesh, dim, sizes)[0]


def all_gather_sized(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """As [`all_gather`][plait.comm.all_gather]; also gives the extent of every rank's piece."""
    group = group_of(mesh)
    dim = normal_dim(dim, x)
    if group.size == 1:
        return x, (x.shape[dim],)
    if sizes is not None:
        sizes = _checked_sizes("all_gather", group, x, dim, sizes)
        if sizes[group.rank] != x.shape[dim]:
            raise RankError(
                f"all_gather of a tensor {tuple(x.shape)} along dim {dim}",
                f"rank {group.global_ranks[group.rank]} should hold {sizes[group.rank]} of "
                f"{sum(sizes)} there but holds {x.shape[dim]} (sizes {list(sizes)})",
            )
    out, sizes = transport_of(group).all_gather(x.detach(), dim, sizes)
    if counting.is_counting():
        counting.record("all_gather", out.numel() * out.element_size())
    return out, sizes


def reduce_scatter(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's piece along `dim` of the sum of every rank's `x`.

    Args:
        x: This rank's term, of the same shape and dtype on every rank.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension to split.
        sizes: Extent along `dim` of every rank's piece; `torch.chunk`'s by default.

    Returns:
        The piece, `sizes[rank]` long along `dim`.

    Raises:
        RankError: A rank asked for something else, died, or did not come in time.

    Comm:
        One reduce-scatter of `x`'s bytes.
    """
    group = group_of(mesh)
    if group.size == 1:
        return x
    dim = normal_dim(dim, x)
    sizes = _checked_sizes("reduce_scatter", group, x, dim, sizes)
    if counting.is_counting():
        counting.record("reduce_scatter", x.numel() * x.element_size())
    return transport_of(group).reduce_scatter(x.detach(), dim, sizes)


def broadcast(x: Tensor, mesh: DeviceMesh, src: int = 0) -> Tensor:
    """The `x` of one rank, on all.

    Args:
        x: The tensor to send on rank `src`; on the others one of the same shape and dtype.
        mesh: The axis, a 1-D mesh.
        src: Group rank of the sender.

    Returns:
        A tensor with the values of rank `src`.

    Raises:
        RankError: A rank asked for something else, died, or did not come in time.

    Comm:
        One broadcast of `x`'s bytes.
    """
    group = group_of(mesh)
    if group.size == 1:
        return x
    if counting.is_counting():
        counting.record("broadcast", x.numel() * x.element_size())
    return transport_of(group).broadcast(x.detach(), src)


def split(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's piece of an `x` that every rank holds; a copy, no communication.

    Args:
        x: The whole.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension to split.
        sizes: Extent along `dim` of every rank's piece; `torch.chunk`'s by default.

    Returns:
        The piece, `sizes[rank]` long along `dim`, contiguous.
    """
    group = group_of(mesh)
    if group.size == 1:
        return x
    dim = normal_dim(dim, x)
    sizes = _checked_sizes("split", group, x, dim, sizes)
    start = sum(sizes[: group.rank])
    piece = x.detach().narrow(dim, start, sizes[group.rank])
    return piece.clone(memory_format=torch.contiguous_format)


def split_sizes(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The extent of every rank's piece of `x` along `dim`, checked."""
    return _checked_sizes("split", group_of(mesh), x, normal_dim(dim, x), sizes)


def _checked_sizes(
    kind: str, group: Group, x: Tensor, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Sizes as a tuple of one entry per rank that, but for a gather, add up to `x`."""
    if sizes is None:
        return chunk_sizes(x.shape[dim], group.size)
    sizes = tuple(sizes)
    problems = []
    if len(sizes) != group.size:
        problems.append(f"{len(sizes)} sizes {list(sizes)} for {group.size} ranks")
    if any(n < 0 for n in sizes):
        problems.append(f"a size is negative: {list(sizes)}")
    if kind != "all_gather" and sum(sizes) != x.shape[dim]:
        problems.append(f"the sizes {list(sizes)} add up to {sum(sizes)}, not {x.shape[dim]}")
    if problems:
        raise RankError(f"{kind} of a tensor {tuple(x.shape)} along dim {dim}", problems)
    return sizes
