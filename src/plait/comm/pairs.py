"""Differentiable collectives in pairs: the backward of one is the forward of the other.

| forward | | backward | partner |
|---|---|---|---|
| `copy_to` | nothing | all-reduce | `sum_from` |
| `sum_from` | all-reduce | nothing | `copy_to` |
| `split_to` | slice | all-gather | `gather_from` |
| `gather_from` | all-gather | slice | `split_to` |
| `scatter_sum` | reduce-scatter | all-gather | `gather_copy` |
| `gather_copy` | all-gather | reduce-scatter | `scatter_sum` |

The calculus behind the table: a value that every rank holds *alike* is one value, so its gradient
is the same on every rank; a value that differs by rank has a gradient of its own on each. `copy_to`
hands one value to ranks that then do different things with it, so the gradients add up; `sum_from`
adds different terms to one value, whose gradient each term receives. Gradients of gradients are not
defined here and raise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import raw
from plait.comm.border import find_border, find_border_of_view, keep_border
from plait.comm.group import group_of
from plait.comm.once import first_order

Sizes = Sequence[int] | None


def _records(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _CopyTo(Function):
    """Partner: _SumFrom."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        # Not a view of x in autograd's sense: a view would hold x, and x holds the border. But a
        # view of something: autograd then refuses to modify it in place. The modification would
        # reach x's memory, and x's graph would not know.
        same_memory = x.detach()
        return same_memory.view_as(same_memory)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        # A missing gradient arrives as zeros, so that every rank takes part in the sum.
        return raw.all_reduce(grad, ctx.mesh), None


class _SumFrom(Function):
    """Partner: _CopyTo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, fresh: bool) -> Tensor:
        return raw.all_reduce_(x.detach(), mesh) if fresh else raw.all_reduce(x, mesh)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _SplitTo(Function):
    """Partner: _GatherFrom."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes) -> Tensor:
        ctx.args = mesh, dim, raw.split_sizes(x, mesh, dim, sizes)
        return raw.split(x, mesh, dim, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw.all_gather(grad, *ctx.args), None, None, None


class _GatherFrom(Function):
    """Partner: _SplitTo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes) -> Tensor:
        whole, sizes = raw.all_gather_sized(x, mesh, dim, sizes)
        ctx.args = mesh, dim, sizes
        return whole

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw.split(grad, *ctx.args), None, None, None


class _ScatterSum(Function):
    """Partner: _GatherCopy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes) -> Tensor:
        ctx.args = mesh, dim, raw.split_sizes(x, mesh, dim, sizes)
        return raw.reduce_scatter(x, mesh, dim, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw.all_gather(grad, *ctx.args), None, None, None


class _GatherCopy(Function):
    """Partner: _ScatterSum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes) -> Tensor:
        whole, sizes = raw.all_gather_sized(x, mesh, dim, sizes)
        ctx.args = mesh, dim, sizes
        return whole

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw.reduce_scatter(grad, *ctx.args), None, None, None


def copy_to(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Hand a value that every rank holds to computations that differ by rank.

    Called again with the same tensor object and mesh it returns the same result, so that the q, k
    and v projections of one hidden state cause one reduction in the backward, not three. (A leaf
    that requires grad is not shared: leaves are few, and the shared border of one would live for
    ever.) The partner is [`sum_from`][plait.comm.sum_from].

    Args:
        x: The value, equal on every rank.
        mesh: The axis, a 1-D mesh.

    Returns:
        `x`'s values with `x`'s shape, in `x`'s memory; `x` itself where no gradient is recorded.

    Raises:
        RuntimeError: Not here, but from torch, where a gradient is recorded and the result is
            modified in place: the operation would change `x` without `x`'s graph knowing of it.
            Give a module that modifies its input a copy.

    Comm:
        Forward nothing; backward one all-reduce of `x`'s bytes.
    """
    if not _records(x) or raw.mesh_size(mesh) == 1:
        return x
    if torch.compiler.is_compiling():
        return _apply(_CopyTo, x, mesh)
    group = group_of(mesh)
    border = find_border(x, group)
    if border is None:
        border = find_border_of_view(x, group)
    if border is None:
        border = _apply(_CopyTo, x, mesh)
        keep_border(x, group, border)
    return border


def sum_from(x: Tensor, mesh: DeviceMesh, *, fresh: bool = False) -> Tensor:
    """Add the terms of all ranks to one value that every rank holds.

    The partner is [`copy_to`][plait.comm.copy_to].

    Args:
        x: This rank's term.
        mesh: The axis, a 1-D mesh.
        fresh: `x` is the new output of a computation and nobody else will read it, so the sum may
            take its memory.

    Returns:
        The sum, of `x`'s shape, bit-equal on every rank.

    Comm:
        Forward one all-reduce of `x`'s bytes; backward nothing.
    """
    if _records(x):
        return x if raw.mesh_size(mesh) == 1 else _apply(_SumFrom, x, mesh, fresh)
    return raw.all_reduce_(x, mesh) if fresh else raw.all_reduce(x, mesh)


def split_to(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes = None) -> Tensor:
    """Keep this rank's piece of a value that every rank holds.

    The partner is [`gather_from`][plait.comm.gather_from].

    Args:
        x: The value, equal on every rank.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension to split.
        sizes: Extent along `dim` of every rank's piece; `torch.chunk`'s by default.

    Returns:
        The piece, `sizes[rank]` long along `dim`.

    Comm:
        Forward nothing; backward one all-gather of `x`'s bytes.
    """
    if _records(x) and raw.mesh_size(mesh) > 1:
        return _apply(_SplitTo, x, mesh, dim, sizes)
    return raw.split(x, mesh, dim, sizes)


def gather_from(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes = None) -> Tensor:
    """Join the ranks' pieces to one value that every rank holds and uses alike.

    The partner is [`split_to`][plait.comm.split_to]. Where the ranks use the result differently,
    [`gather_copy`][plait.comm.gather_copy] is the one.

    Args:
        x: This rank's piece.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension the pieces lie along.
        sizes: Extent along `dim` of every rank's piece; asked from the ranks by default.

    Returns:
        The whole, `sum(sizes)` long along `dim`.

    Comm:
        Forward one all-gather of the whole's bytes; backward nothing.
    """
    if _records(x) and raw.mesh_size(mesh) > 1:
        return _apply(_GatherFrom, x, mesh, dim, sizes)
    return raw.all_gather(x, mesh, dim, sizes)


def scatter_sum(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes = None) -> Tensor:
    """Add the terms of all ranks and keep this rank's piece of the sum.

    The partner is [`gather_copy`][plait.comm.gather_copy].

    Args:
        x: This rank's term.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension to split.
        sizes: Extent along `dim` of every rank's piece; `torch.chunk`'s by default.

    Returns:
        The piece, `sizes[rank]` long along `dim`.

    Comm:
        Forward one reduce-scatter, backward one all-gather, each of `x`'s bytes.
    """
    if _records(x) and raw.mesh_size(mesh) > 1:
        return _apply(_ScatterSum, x, mesh, dim, sizes)
    return raw.reduce_scatter(x, mesh, dim, sizes)


def gather_copy(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sizes = None) -> Tensor:
    """Join the ranks' pieces and hand the whole to computations that differ by rank.

    The partner is [`scatter_sum`][plait.comm.scatter_sum].

    Args:
        x: This rank's piece.
        mesh: The axis, a 1-D mesh.
        dim: The tensor dimension the pieces lie along.
        sizes: Extent along `dim` of every rank's piece; asked from the ranks by default.

    Returns:
        The whole, `sum(sizes)` long along `dim`.

    Comm:
        Forward one all-gather, backward one reduce-scatter, each of the whole's bytes.
    """
    if _records(x) and raw.mesh_size(mesh) > 1:
        return _apply(_GatherCopy, x, mesh, dim, sizes)
    return raw.all_gather(x, mesh, dim, sizes)


def _apply(function: type[Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out
