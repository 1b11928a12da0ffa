"""One outcome for all ranks: where one of them fails, all of them raise, and name it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from plait.errors import PlaitError, RankError, WeightsError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

ARRIVAL_S = 10.0
"""How long a rank waits for the others where all must make the same call."""


def meet(
    mesh: "DeviceMesh | None",
    point: str,
    content: Any = None,
    failure: BaseException | None = None,
    asked: str | None = None,
) -> list[Any]:
    """Gives every rank the content of every rank, or the failure of one.

    Args:
        mesh: The axis whose ranks meet, or a mesh of several axes; None for one process.
        point: Where in the program this is; the same on all ranks.
        content: A small picklable value.
        failure: What went wrong on this rank, if anything.
        asked: What is being done, for the message on the other ranks; `point` by default.

    Returns:
        One content for each rank of the mesh, in its order.

    Raises:
        BaseException: `failure` itself.
        RankError: Another rank failed, or is at another point.

    Comm:
        One exchange of a control message on every axis.
    """
    told = [(point, None, content)]
    if mesh is not None and mesh.size() > 1:
        from plait import comm

        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = _told_by_all((point, text, content), mesh)
        if failure is None:
            error = _difference(point if asked is None else asked, told, mesh)
            failure = None if error is None else comm.mark_announced(error)
        else:
            comm.mark_announced(failure)
    if failure is not None:
        raise failure
    return [content for _, _, content in told]


def arrive(
    mesh: "DeviceMesh | None",
    asked: str,
    call: str,
    content: Any = None,
    failure: BaseException | None = None,
    ways_out: Sequence[str] = (),
    seconds: float | None = None,
) -> list[Any]:
    """Meets at the beginning of a call that all ranks must make; does not wait long for them.

    Args:
        mesh: The ranks; None for one process.
        asked: What is being done.
        call: The function's name.
        content: As for `meet`.
        failure: Why this rank refuses, if it does.
        ways_out: What to do where a rank does not come.
        seconds: How long to wait; `ARRIVAL_S` by default (between GPUs and hosts: the process
            group's time limit).

    Returns:
        The content of every rank.

    Raises:
        BaseException: `failure` itself, whatever became of the others.
        RankError: Another rank refused, or did not come.

    Comm:
        One exchange of a control message on every axis.
    """
    from plait import comm

    seconds = ARRIVAL_S if seconds is None else seconds
    axes = _axes(mesh)
    before = [comm.set_timeout(axis, seconds) for axis in axes]
    try:
        return meet(mesh, call, content, failure, asked)
    except RankError as error:
        if failure is not None:  # the caller's own mistake
            raise failure from error
        if error.asked == asked:
            raise
        absent = RankError(
            asked,
            [error.asked, *error.problems],
            [
                *ways_out,
                "what only one rank does before it may not take longer than "
                f"{seconds:g} s: do it afterwards",
            ],
            rank=error.rank,
        )
        raise comm.mark_announced(absent) from error
    finally:
        for axis, limit in zip(axes, before, strict=True):
            comm.set_timeout(axis, limit)


def _axes(mesh: "DeviceMesh | None") -> list["DeviceMesh"]:
    """The axes of a mesh that have several ranks, the innermost first."""
    if mesh is None or mesh.size() == 1:
        return []
    if mesh.ndim == 1:
        return [mesh]
    axes = [mesh[name] for name in reversed(mesh.mesh_dim_names or ())]
    return [axis for axis in axes if axis.size() > 1]


def _told_by_all(content: Any, mesh: "DeviceMesh") -> list[Any]:
    """Every rank's content, in the order of `mesh.mesh.flatten()`."""
    from plait import comm

    told = [content]
    for axis in _axes(mesh):
        told = [one for part in comm.exchange(told, axis) for one in part]
    return told


def _difference(asked: str, told: list[Any], mesh: "DeviceMesh") -> RankError | None:
    """The error of a rank that is well, if another is not."""
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    failed = [(rank, text) for rank, (_, text, _) in zip(ranks, told, strict=True) if text]
    if failed:
        problems = [f"rank {rank} failed: {text}" for rank, text in failed]
        return RankError(asked, problems, rank=failed[0][0])
    if len({point for point, _, _ in told}) == 1:
        return None
    return RankError(
        asked,
        [f"rank {rank} is at {point!r}" for rank, (point, _, _) in zip(ranks, told, strict=True)],
        "take the same path through the program, with the same arguments, on all ranks",
    )


def together(mesh: "DeviceMesh | None", asked: str, work: Callable[[], T]) -> T:
    """Does `work` on every rank; if it fails on one, it fails on all of them.

    Args:
        mesh: The ranks that wait for each other; None for one process.
        asked: What is being done, for the message on the ranks where it succeeded.
        work: The work; it must not communicate.

    Returns:
        The result of this rank's own `work`.

    Raises:
        PlaitError: This rank's own failure, as it was raised.
        RankError: Another rank's failure, naming that rank.

    Comm:
        One exchange of a control message.
    """
    if mesh is None or mesh.size() == 1:
        return work()
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    settle(mesh, asked, failure)
    return result


def settle(mesh: "DeviceMesh | None", asked: str, failure: Exception | None = None) -> None:
    """Tells the other ranks how this one fares, and raises where any of them failed.

    Args:
        mesh: The ranks that wait for each other; None for one process.
        asked: What is being done.
        failure: What went wrong on this rank, if anything.

    Raises:
        Exception: `failure` itself.
        RankError: Another rank failed.

    Comm:
        One exchange of a control message.
    """
    try:
        meet(mesh, "outcome", failure=failure, asked=asked)
    except (OSError, SafetensorError) as error:
        raise WeightsError(asked, str(error)) from error


def agree(mesh: "DeviceMesh | None", asked: str, digest: str) -> None:
    """Checks that all ranks are about to do the same.

    Raises:
        PlaitError: The digests differ; the message names the ranks of each.

    Comm:
        One exchange of a control message.
    """
    told = meet(mesh, "agreement", digest, asked=asked)
    if mesh is not None and len(set(told)) > 1:
        ranks = mesh.mesh.flatten().tolist()
        odd = [str(rank) for rank, text in zip(ranks, told, strict=True) if text != told[0]]
        raise PlaitError(
            asked, f"rank {', '.join(odd)} has another plan or checkpoint than rank {ranks[0]}"
        )
