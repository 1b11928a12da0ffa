"""Control between the ranks of an axis: small messages, failures, time limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from plait.comm.group import announce, group_of, open_groups, transport_of
from plait.comm.link.collectives import Link
from plait.comm.torch_transport import TorchTransport


def exchange(obj: Any, mesh: DeviceMesh) -> list[Any]:
    """Give every rank every rank's object.

    Args:
        obj: A small object that can be pickled.
        mesh: The axis, a 1-D mesh.

    Returns:
        The objects in group-rank order.

    Raises:
        RankError: A rank asked for something else, died, or did not come in time.

    Comm:
        A control message, not counted as a collective.
    """
    group = group_of(mesh)
    if group.size == 1:
        return [obj]
    return transport_of(group).exchange(obj)


def announce_failure(mesh: DeviceMesh | None, message: str) -> None:
    """Tell the other ranks of the axis that this one has failed and will not come.

    Those that wait for it in a collective, or come to one later, raise
    [`RankError`][plait.errors.RankError] with the message instead of waiting. Each rank hears of it
    once; a caller that recovers may use the axis again. torch.distributed offers no way to wake a
    rank that waits, so this reaches the ranks of one host on the CPU only.

    Args:
        mesh: The axis, a 1-D mesh; None for every axis this process has talked on.
        message: What happened.
    """
    for group in open_groups() if mesh is None else [group_of(mesh)]:
        if group.size > 1:
            announce(group, message)


def set_timeout(mesh: DeviceMesh, seconds: float) -> float:
    """Set how long collectives on an axis wait for a rank that does not come.

    The default is the process group's own time limit. Only the link between ranks of one host
    obeys; torch.distributed keeps to the limit the group was made with.

    Args:
        mesh: The axis, a 1-D mesh.
        seconds: The limit.

    Returns:
        The limit that held before.
    """
    group = group_of(mesh)
    before, group.timeout_s = group.timeout_s, float(seconds)
    if group.transport is not None:
        group.transport.set_timeout(group.timeout_s)
    return before


@contextmanager
def through_torch(mesh: DeviceMesh) -> Iterator[None]:
    """In this block the collectives of an axis go through torch.distributed, link or not.

    For comparisons. Every rank of the axis enters and leaves the block between the same
    collectives.

    Args:
        mesh: The axis, a 1-D mesh.
    """
    group = group_of(mesh)
    before = group.transport
    group.transport = TorchTransport(group.process_group, group.global_ranks)
    try:
        yield
    finally:
        group.transport = before


def is_linked(mesh: DeviceMesh) -> bool:
    """Whether the collectives of an axis go through shared memory.

    Made on the first use, so this is a collective of its own if nothing has been sent yet.

    Args:
        mesh: The axis, a 1-D mesh.
    """
    group = group_of(mesh)
    return group.size > 1 and isinstance(transport_of(group), Link)
