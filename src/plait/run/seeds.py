"""Random number generators: set them all, or borrow them and give them back."""

import contextlib
import random
import sys
from collections.abc import Iterator


def set_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (every device's) with one number."""
    import torch

    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def borrowed(seed: int | None = None) -> Iterator[None]:
    """Inside, torch's generators start from `seed`; afterwards they are as they were before.

    Args:
        seed: None keeps the current state as the start.
    """
    import torch

    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if used else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield
