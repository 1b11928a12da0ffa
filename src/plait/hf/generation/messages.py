"""Small messages between the ranks of a group, so that one rank's failure reaches all."""

import hashlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import RankError
from plait.weights.outcome import meet

_ASKED = "generate() on a split model needs every rank of the group at the same step."


def global_ranks(mesh: DeviceMesh) -> list[int]:
    """The global rank of each member of a 1-D mesh, in group order."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def exchange(tag: str, content: Any, mesh: DeviceMesh) -> list[Any]:
    """Gives every rank the `content` of every rank, in group order.

    Args:
        tag: What the message is about; all ranks must be at the same point.
        content: A small picklable value.
        mesh: The 1-D mesh of the group.

    Returns:
        One content per rank of the group.

    Raises:
        RankError: A rank reported a failure, or is at another point of `generate`.

    Comm:
        One `comm.exchange`.
    """
    return meet(mesh, tag, content, asked=_ASKED)


def report_failure(error: BaseException, mesh: DeviceMesh) -> None:
    """Tells the other ranks of a CPU group that this one leaves `generate` with an error.

    On the ranks of one host it is announced: whatever they wait in raises. Between hosts they read
    it in the exchange they are in or come to. A CUDA collective can't be interrupted either way,
    and a message would wait for it: there the error just leaves this rank.

    Comm:
        One `comm.exchange` on a CPU mesh without a link, none otherwise.
    """
    if comm.announce_failure(mesh, error) or mesh.device_type != "cpu":
        return
    if not isinstance(error, RankError | KeyboardInterrupt | SystemExit):
        try:
            meet(mesh, "failure", failure=error)
        except (RankError, type(error)):
            return  # the others know by now; the caller re-raises the error itself


def digest(tensor: torch.Tensor) -> str:
    """A short checksum of a tensor's values, the same on every device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
