"""Small tagged messages between the ranks of a group, so that one rank's failure reaches all."""

import hashlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import RankError

FAILED = "failed"


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
    messages = comm.exchange((tag, content), mesh)
    ranks = global_ranks(mesh)
    for rank, (other_tag, other) in zip(ranks, messages, strict=True):
        if other_tag == FAILED and tag != FAILED:
            raise RankError(
                "generate() on a split model needs every rank of the group.",
                f"rank {rank} failed: {other}",
                rank=rank,
            )
    tags = [message[0] for message in messages]
    if tag != FAILED and len(set(tags)) > 1:
        where = ", ".join(f"rank {rank}: {other}" for rank, other in zip(ranks, tags, strict=True))
        raise RankError(
            "generate() on a split model needs every rank of the group at the same step.",
            f"the ranks are at different points ({where})",
            "call generate() with the same arguments on all ranks of the group",
        )
    return [message[1] for message in messages]


def report_failure(error: BaseException, mesh: DeviceMesh) -> None:
    """Tells the other ranks of a CPU group that this one leaves `generate` with an error.

    The others are in some other exchange (they read the report) or in a tensor collective (the
    CPU link then refuses the mismatch on all ranks). A CUDA collective can't be interrupted that
    way, and the report itself would wait for it: there the error just leaves this rank.

    Comm:
        One `comm.exchange` on a CPU mesh, none otherwise.
    """
    if mesh.device_type != "cpu" or isinstance(error, RankError | KeyboardInterrupt | SystemExit):
        return
    try:
        exchange(FAILED, f"{type(error).__name__}: {error}", mesh)
    except RankError:
        return  # the others know by now; the caller re-raises the error itself


def digest(tensor: torch.Tensor) -> str:
    """A short checksum of a tensor's values, the same on every device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
