"""One axis of a mesh as comm sees it: who is in the group, and by which transport it talks.

The record is kept on the mesh object itself, so it lives as long as the mesh does and a
re-initialised torch.distributed starts afresh. Ranks in this room are *group* ranks unless a
name says `global`.
"""

import collections
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.transport import Transport
from plait.errors import RankError

_ATTRIBUTE = "_plait_group"


class Group:
    """The ranks along one mesh axis.

    Attributes:
        process_group: The torch process group of the axis.
        rank: This rank's place in the group.
        size: Number of ranks.
        global_ranks: Global rank of each group rank.
        device_type: Device type of the mesh, "cpu" or "cuda".
        timeout_s: How long a collective waits for a rank that does not come.
        transport: What carries the collectives; made on first use by `transport_of`.
    """

    __slots__ = (
        "device_type",
        "global_ranks",
        "process_group",
        "rank",
        "size",
        "timeout_s",
        "transport",
    )

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise RankError(
                f"a collective over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}",
                "collectives act on one axis at a time",
                'take one axis, for example mesh["tp"]',
            )
        self.process_group = mesh.get_group()
        self.rank = self.process_group.rank()
        self.size = self.process_group.size()
        self.global_ranks = tuple(dist.get_process_group_ranks(self.process_group))
        self.device_type = mesh.device_type
        self.timeout_s = _default_timeout(self.process_group, mesh.device_type).total_seconds()
        self.transport: Transport | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A mesh is pickled and copied with its attributes, process groups cannot be. An empty
        # OrderedDict is accepted by torch.load(weights_only=True), and group_of ignores it.
        return (collections.OrderedDict, ())


def _default_timeout(process_group: dist.ProcessGroup, device_type: str) -> timedelta:
    try:
        backend = process_group._get_backend(torch.device(device_type))
        timeout = backend.options._timeout
    except (AttributeError, RuntimeError):  # the fake backend has no options
        return timedelta(minutes=30)
    return timeout if isinstance(timeout, timedelta) else timedelta(minutes=30)


def group_of(mesh: DeviceMesh) -> Group:
    """The group of a 1-D mesh, made once per mesh object."""
    group: object = mesh.__dict__.get(_ATTRIBUTE)
    if type(group) is Group:
        return group
    group = Group(mesh)
    mesh.__dict__[_ATTRIBUTE] = group
    return group


def transport_of(group: Group) -> Transport:
    """The transport of a group; on the first call all ranks of the group make it together."""
    transport = group.transport
    if transport is None:
        from plait.comm.torch_transport import TorchTransport

        transport = group.transport = TorchTransport(group)
    return transport
