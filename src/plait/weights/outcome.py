"""One outcome for all ranks: where one of them fails, all of them raise, and name it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from plait.errors import PlaitError, RankError, WeightsError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def meet(
    mesh: "DeviceMesh | None",
    point: str,
    content: Any = None,
    failure: BaseException | None = None,
    asked: str | None = None,
) -> list[Any]:
    """Gives every rank the content of every rank, or the failure of one.

    Args:
        mesh: The axis whose ranks meet; None for one process.
        point: Where in the program this is; the same on all ranks.
        content: A small picklable value.
        failure: What went wrong on this rank, if anything.
        asked: What is being done, for the message on the other ranks; `point` by default.

    Returns:
        One content for each rank of the axis, in its order.

    Raises:
        BaseException: `failure` itself.
        RankError: Another rank failed, or is at another point.

    Comm:
        One exchange of a control message.
    """
    told = [(point, None, content)]
    if mesh is not None and mesh.size() > 1:
        from plait import comm

        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = comm.exchange((point, text, content), mesh)
        if failure is None:
            error = _difference(point if asked is None else asked, told, mesh)
            failure = None if error is None else comm.mark_announced(error)
        else:
            comm.mark_announced(failure)
    if failure is not None:
        raise failure
    return [content for _, _, content in told]


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
        mesh: The axis whose ranks wait for each other; None for one process.
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
        mesh: The axis whose ranks wait for each other; None for one process.
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
    except OSError as error:
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
