"""The collectives as operators that torch.compile can put into a graph.

Inside a compiled region `raw` calls these instead of the transport. They name the group by its
process group's name, and look it up when the graph runs, so the link serves compiled code too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import counting
from plait.comm.group import group_named, transport_of
from plait.comm.transport import Op


def group_name(mesh: DeviceMesh) -> str:
    """The name under which the operators find the group of a mesh."""
    name: str = mesh.get_group().group_name
    return name


@torch.library.custom_op("plait::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The reduction of every rank's `x`."""
    kind: Op = "max" if op == "max" else "sum"
    counting.record("all_reduce", x.numel() * x.element_size())
    return transport_of(group_named(group, x.device.type)).all_reduce(x, kind, None)


@all_reduce.register_fake
def _(x: Tensor, op: str, group: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("plait::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, sizes: Sequence[int] | None, group: str) -> Tensor:
    """Every rank's `x` along `dim`; without sizes the pieces are even."""
    named = group_named(group, x.device.type)
    if sizes is None:
        sizes = (x.shape[dim],) * named.size
    whole, _ = transport_of(named).all_gather(x, dim, tuple(sizes))
    counting.record("all_gather", whole.numel() * whole.element_size())
    return whole


@all_gather.register_fake
def _(x: Tensor, dim: int, sizes: Sequence[int] | None, group: str) -> Tensor:
    shape = list(x.shape)
    size = group_named(group, x.device.type).size
    shape[dim] = shape[dim] * size if sizes is None else sum(sizes)
    return x.new_empty(shape)


@torch.library.custom_op("plait::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    """This rank's piece of the sum."""
    counting.record("reduce_scatter", x.numel() * x.element_size())
    return transport_of(group_named(group, x.device.type)).reduce_scatter(x, dim, tuple(sizes))


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sizes[group_named(group, x.device.type).rank]
    return x.new_empty(shape)


@torch.library.custom_op("plait::broadcast", mutates_args=())
def broadcast(x: Tensor, src: int, group: str) -> Tensor:
    """The `x` of group rank `src`."""
    counting.record("broadcast", x.numel() * x.element_size())
    return transport_of(group_named(group, x.device.type)).broadcast(x, src)


@broadcast.register_fake
def _(x: Tensor, src: int, group: str) -> Tensor:
    return x.new_empty(x.shape)
