"""One axis of a mesh as comm sees it: who is in the group, and by which transport it talks.

There is one record per process group, found through an attribute of the mesh. Ranks in this room
are *group* ranks unless a name says `global`.
"""

import atexit
import collections
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from plait.comm.link import rendezvous
from plait.comm.torch_transport import TorchTransport
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

    def __init__(self, process_group: dist.ProcessGroup, device_type: str) -> None:
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.global_ranks = tuple(dist.get_process_group_ranks(process_group))
        self.device_type = device_type
        self.timeout_s = _default_timeout(process_group, device_type).total_seconds()
        self.transport: Transport | None = None

    def close(self) -> None:
        """Let go of memory shared with other processes."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A mesh is pickled and copied with its attributes, process groups cannot be. An empty
        # OrderedDict is accepted by torch.load(weights_only=True), and group_of ignores it.
        return (collections.OrderedDict, ())


def _default_timeout(process_group: dist.ProcessGroup, device_type: str) -> timedelta:
    try:
        options = process_group._get_backend(torch.device(device_type)).options
        return options._timeout
    except (AttributeError, RuntimeError):  # the fake backend has no options
        return timedelta(minutes=30)


# A process group has one link in a process, however many mesh objects stand for it (mesh["tp"]
# makes a new one each time). The name finds the record from inside a compiled graph.
_groups: dict[str, Group] = {}


def group_of(mesh: DeviceMesh) -> Group:
    """The group of a 1-D mesh."""
    group = mesh.__dict__.get(_ATTRIBUTE)
    if type(group) is Group:
        return group
    if mesh.ndim != 1:
        raise RankError(
            f"a collective over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}",
            "collectives act on one axis at a time",
            'take one axis, for example mesh["tp"]',
        )
    group = _record(mesh.get_group(), mesh.device_type)
    mesh.__dict__[_ATTRIBUTE] = group
    return group


def group_named(name: str, device_type: str) -> Group:
    """The group of a process group's name."""
    return _record(dist.distributed_c10d._resolve_process_group(GroupName(name)), device_type)


def _record(process_group: dist.ProcessGroup, device_type: str) -> Group:
    name = process_group.group_name
    group = _groups.get(name)
    if group is None or group.process_group is not process_group:
        _forget_destroyed()
        group = _groups[name] = Group(process_group, device_type)
    return group


def open_groups() -> list[Group]:
    """The groups that have been used."""
    _forget_destroyed()
    return list(_groups.values())


@atexit.register
def _let_go() -> None:
    """Hold no process group into the shutdown of the interpreter, where its threads cannot end."""
    for group in _groups.values():
        group.close()
        del group.process_group
    _groups.clear()


def _forget_destroyed() -> None:
    """Close what belonged to process groups that torch has destroyed since."""
    alive = dist.distributed_c10d._world.pg_map
    for name in [name for name, group in _groups.items() if group.process_group not in alive]:
        _groups.pop(name).close()


def transport_of(group: Group) -> Transport:
    """The transport of a group; on the first call all ranks of the group make it together."""
    transport = group.transport
    if transport is None or transport.spent:
        transport = group.transport = _make_transport(group)
    return transport


def _make_transport(group: Group) -> Transport:
    if group.transport is not None:
        # The last one ended with a failure. Where a rank has died there will be no next one.
        group.transport.raise_if_final()
        group.close()
    through_torch = TorchTransport(group.process_group, group.global_ranks)
    if group.device_type != "cpu":
        return through_torch
    link = rendezvous.make_link(
        group.process_group, group.global_ranks, group.timeout_s, through_torch
    )
    return through_torch if link is None else link


def announce(group: Group, message: str) -> bool:
    """Tell the other ranks of a group that this one has failed; whether they will hear it."""
    if group.transport is not None and not group.transport.spent:
        return group.transport.announce_failure(message)
    # No link yet, or none any more: the ranks meet next where a link is made.
    return group.device_type == "cpu" and rendezvous.announce(group.process_group, message)
