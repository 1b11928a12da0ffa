"""One outcome for all ranks: where one of them fails, all of them raise, and name it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from plait.errors import PlaitError, RankError, WeightsError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


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
    if mesh is not None and mesh.size() > 1:
        from plait import comm

        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = comm.exchange(message, mesh)
        if failure is None:
            failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
            if failed:
                ranks = mesh.mesh.flatten().tolist()
                problems = [f"rank {ranks[rank]} failed: {text}" for rank, text in failed]
                raise RankError(asked, problems, rank=ranks[failed[0][0]])
    if isinstance(failure, OSError):
        raise WeightsError(asked, str(failure)) from failure
    if failure is not None:
        raise failure


def agree(mesh: "DeviceMesh | None", asked: str, digest: str) -> None:
    """Checks that all ranks are about to do the same.

    Raises:
        PlaitError: The digests differ; the message names the ranks of each.

    Comm:
        One exchange of a control message.
    """
    if mesh is None or mesh.size() == 1:
        return
    from plait import comm

    told = comm.exchange(digest, mesh)
    if len(set(told)) > 1:
        ranks = mesh.mesh.flatten().tolist()
        odd = [str(rank) for rank, text in zip(ranks, told, strict=True) if text != told[0]]
        raise PlaitError(
            asked, f"rank {', '.join(odd)} has another plan or checkpoint than rank {ranks[0]}"
        )
