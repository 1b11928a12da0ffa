"""Which device this rank computes on."""

from typing import TYPE_CHECKING

from plait.errors import LayoutError

if TYPE_CHECKING:
    import torch


def default_type() -> str:
    """The type "cuda" where a CUDA device is usable, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def for_rank(device_type: str, local_rank: int) -> "torch.device":
    """The device of the rank with this local rank.

    Args:
        device_type: "cpu" or "cuda".
        local_rank: Rank among the processes of this host.

    Raises:
        LayoutError: The type is neither, or there are fewer CUDA devices than ranks here.
    """
    import torch

    asked = f"a {device_type} device for local rank {local_rank}"
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type != "cuda":
        raise LayoutError(asked, f"device type {device_type!r} is neither 'cpu' nor 'cuda'")
    if not torch.cuda.is_available():
        raise LayoutError(
            asked, "torch sees no CUDA device", ("use device type 'cpu'", "check nvidia-smi")
        )
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise LayoutError(
            asked,
            f"this host has {num_devices} CUDA device(s), numbered from 0",
            (f"start at most {num_devices} processes on this host", "use device type 'cpu'"),
        )
    return torch.device("cuda", local_rank)
