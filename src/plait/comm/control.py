"""Control between the ranks of an axis: small messages, failures, time limits."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from plait.comm.announced import is_announced, mark_announced
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


def announce_failure(mesh: DeviceMesh | None, failure: str | BaseException) -> bool:
    """Tell the other ranks of the axis that this one has failed and will not come.

    Those that wait for it in a collective, or come to one later, raise
    [`RankError`][plait.errors.RankError] with the message instead of waiting. Collectives that this
    rank has left are not touched. Each rank hears of it once, ranks that announce failures of their
    own do not hear of the others', and then the axis works again for all of them.

    One exception is announced once, whoever announces it on its way up, and those that the others
    know of (a RankError that a collective raised) not at all. Nothing waits here.
    torch.distributed offers no way to wake a rank that waits, so this reaches the ranks of one host
    on the CPU only; elsewhere it does nothing.

    Args:
        mesh: The axis, a 1-D mesh; None for every axis this process has talked on.
        failure: What happened. A text, in an `except` block, is about the exception handled there.

    Returns:
        Whether the other ranks will hear of it, or have.
    """
    error = failure if isinstance(failure, BaseException) else sys.exception()
    if error is not None and is_announced(error):
        return True
    text = failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
    groups = open_groups() if mesh is None else [group_of(mesh)]
    heard = [announce(group, text) for group in groups if group.size > 1]
    if error is not None and heard and all(heard):
        mark_announced(error)
    return all(heard)


@contextmanager
def announcing(mesh: DeviceMesh) -> Iterator[None]:
    """An exception that leaves this block is announced to the other ranks of the axis.

    The forward of a split module does this by itself. A failure in the backward or in the optimizer
    does not pass through the module: where it ends the process, the others find that out within a
    second; where it is caught and the process goes on, they would wait, so put the step in here.

    Args:
        mesh: The axis, a 1-D mesh.
    """
    try:
        yield
    except BaseException as error:
        announce_failure(mesh, error)
        raise


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
