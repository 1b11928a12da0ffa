"""Collectives on one mesh axis without autograd. Results are new tensors.

Every function takes the same arguments on every rank but for the data. Ranks are group ranks.
For a group of one rank there is nothing to do and `x` itself comes back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import compiled, counting
from plait.comm.arguments import (
    checked_dim,
    checked_sizes,
    dim_problems,
    is_imaginary,
    local_data,
    refused,
    size_problems,
)
from plait.comm.group import group_of, transport_of
from plait.comm.sizes import chunk_sizes
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
    if torch.compiler.is_compiling():
        return x if mesh.size() == 1 else compiled.all_reduce(x, op, compiled.group_name(mesh))
    group = group_of(mesh)
    if group.size == 1:
        return x
    x = local_data(x)
    if counting.is_counting():
        counting.record("all_reduce", x.numel() * x.element_size())
    if is_imaginary(x):
        return x.new_empty(x.shape)
    return transport_of(group).all_reduce(x, op, None)


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
    if torch.compiler.is_compiling():
        return all_reduce(x, mesh, op)
    group = group_of(mesh)
    if group.size == 1:
        return x
    out = local_data(x)
    if counting.is_counting():
        counting.record("all_reduce", out.numel() * out.element_size())
    if not is_imaginary(out):
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
    if torch.compiler.is_compiling():
        return _all_gather_compiled(x, mesh, dim, sizes)
    group = group_of(mesh)
    dim = checked_dim("all_gather", group, x, dim)
    if group.size == 1:
        return x, (x.shape[dim],)
    x = local_data(x)
    if sizes is not None:
        sizes = checked_sizes("all_gather", group, x, dim, sizes)
    if is_imaginary(x):
        sizes = (x.shape[dim],) * group.size if sizes is None else sizes
        shape = list(x.shape)
        shape[dim] = sum(sizes)
        out = x.new_empty(shape)
    else:
        out, sizes = transport_of(group).all_gather(x, dim, sizes)
    if counting.is_counting():
        counting.record("all_gather", out.numel() * out.element_size())
    return out, sizes


def _all_gather_compiled(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None
) -> tuple[Tensor, tuple[int, ...]]:
    """Inside a compiled region shapes must be known: without sizes the pieces are even."""
    dim %= x.ndim
    sizes = (x.shape[dim],) * mesh.size() if sizes is None else tuple(sizes)
    if mesh.size() == 1:
        return x, sizes
    return compiled.all_gather(x, dim, sizes, compiled.group_name(mesh)), sizes


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
    if torch.compiler.is_compiling():
        if mesh.size() == 1:
            return x
        sizes = split_sizes(x, mesh, dim, sizes)
        piece: Tensor = compiled.reduce_scatter(x, dim % x.ndim, sizes, compiled.group_name(mesh))
        return piece
    group = group_of(mesh)
    if group.size == 1:
        return x
    x = local_data(x)
    dim = checked_dim("reduce_scatter", group, x, dim)
    sizes = checked_sizes("reduce_scatter", group, x, dim, sizes)
    if counting.is_counting():
        counting.record("reduce_scatter", x.numel() * x.element_size())
    if is_imaginary(x):
        shape = list(x.shape)
        shape[dim] = sizes[group.rank]
        return x.new_empty(shape)
    return transport_of(group).reduce_scatter(x, dim, sizes)


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
    if torch.compiler.is_compiling():
        return x if mesh.size() == 1 else compiled.broadcast(x, src, compiled.group_name(mesh))
    group = group_of(mesh)
    if group.size == 1:
        return x
    x = local_data(x)
    if not 0 <= src < group.size:
        raise refused(group, "broadcast", x, [f"group rank {src} of {group.size} is to send"])
    if counting.is_counting():
        counting.record("broadcast", x.numel() * x.element_size())
    if is_imaginary(x):
        return x.new_empty(x.shape)
    return transport_of(group).broadcast(x, src)


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
    if mesh_size(mesh) == 1:
        return x
    sizes = split_sizes(x, mesh, dim, sizes)
    rank = mesh.get_local_rank() if torch.compiler.is_compiling() else group_of(mesh).rank
    piece = x.detach().narrow(dim, sum(sizes[:rank]), sizes[rank])
    return piece.clone(memory_format=torch.contiguous_format)


def split_sizes(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The extent of every rank's piece of `x` along `dim`, checked."""
    problems = dim_problems(x, dim)
    if not problems:
        sizes = chunk_sizes(x.shape[dim], mesh_size(mesh)) if sizes is None else tuple(sizes)
        problems = size_problems(sizes, mesh_size(mesh), x.shape[dim])
        if not problems:
            return sizes
    raise RankError(f"a split of a tensor {tuple(x.shape)} along dim {dim}", problems)


def mesh_size(mesh: DeviceMesh) -> int:
    """Number of ranks on the axis."""
    return mesh.size() if torch.compiler.is_compiling() else group_of(mesh).size
