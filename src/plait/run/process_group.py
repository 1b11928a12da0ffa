"""The default process group: joined once, left quietly.

Source of the backends: `cpu:gloo,cuda:nccl` gives one group that carries CPU tensors over gloo
(control messages, checkpoints) and CUDA tensors over NCCL.
"""

import atexit
import contextlib
import datetime
import sys
import time
from typing import TYPE_CHECKING

from plait.errors import LayoutError, RankError
from plait.run import device, environment

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 600.0
"""How long a collective waits for its peers. Ranks may differ by the time one of them needs to read
its part of a large checkpoint from a slow disk; a rank that is gone is noticed by other means."""

_LAST_WORDS_S = 0.05
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def ensure(device_type: str | None = None, timeout_s: float = TIMEOUT_S) -> "torch.device":
    """Join the run's process group if there is one to join, and say which device to use.

    An existing group is used as it is. Without a launcher nothing is initialised. Calling it again
    changes nothing. A group initialised here is destroyed when the interpreter exits.

    Args:
        device_type: "cpu" or "cuda"; None takes that of the existing group, else CUDA where
            there is one.
        timeout_s: For the group's collectives, if it is initialised here.

    Returns:
        The device of this rank; for CUDA also made the current one.

    Raises:
        LayoutError: The launcher's environment is incomplete, or there are too few devices.
        RankError: The other ranks did not arrive in time.

    Comm: a rendezvous at the launcher's address, once.
    """
    import torch
    import torch.distributed as dist

    place = environment.world()
    existing = dist.is_available() and dist.is_initialized()
    if device_type is None:
        device_type = _type_of_group() if existing else device.default_type()
    found = device.for_rank(device_type, _device_index(device_type, place))
    if found.type == "cuda":
        torch.cuda.set_device(found)
    if place.launched and not existing:
        _join(found, place, timeout_s)
    return found


def leave() -> None:
    """Destroy the default process group if there is one; says nothing when that fails.

    After an uncaught exception the group is left to the operating system instead: peers may be in
    the middle of a collective, and waiting for them would hide the error.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # gloo's threads may still be letting go of the tensors of the last collective, for which they
    # need the interpreter; one that asks for it while it shuts down would abort the process.
    time.sleep(_LAST_WORDS_S)


def _join(found: "torch.device", place: environment.World, timeout_s: float) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            _BACKENDS[found.type],
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=found if found.type == "cuda" else None,
        )
    except (ValueError, KeyError) as error:
        raise LayoutError(
            f"to join {place.world_size} processes as rank {place.rank}",
            f"the launcher's environment is incomplete: {error}",
            "start the script with torchrun --nproc-per-node N",
        ) from error
    except RuntimeError as error:  # the store's errors and gloo's connection errors
        raise RankError(
            f"to join {place.world_size} processes as rank {place.rank}",
            f"the others were not met within {timeout_s:g} s: {error}",
            (
                f"check that all {place.world_size} processes started",
                "check MASTER_ADDR and MASTER_PORT, and that the hosts reach each other",
            ),
        ) from error
    atexit.register(leave)


def _type_of_group() -> str:
    """The device type an existing group is meant for: CUDA if NCCL carries it."""
    import torch.distributed as dist

    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


def _device_index(device_type: str, place: environment.World) -> int:
    """The CUDA device of this rank: by local rank, 0 for an ordinary process.

    An ordinary process keeps the device its user has made current.
    """
    if device_type != "cuda" or place.launched:
        return place.local_rank
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
