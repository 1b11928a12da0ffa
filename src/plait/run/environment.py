"""Where this process stands among the processes of the run."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import LayoutError


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    Args:
        rank: Global rank.
        world_size: Number of processes.
        local_rank: Rank among the processes of this host; the global rank where the launcher
            did not say.
        launched: Whether there is a launcher or a process group. False: an ordinary process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def num_processes(self) -> int | None:
        """What `config.resolve` takes: None when there is no launcher."""
        return self.world_size if self.launched else None


def world(environ: Mapping[str, str] | None = None) -> World:
    """This process's place, from the process group if there is one, else from the launcher.

    Args:
        environ: Where to read RANK, WORLD_SIZE and LOCAL_RANK; None reads the environment.

    Raises:
        LayoutError: The variables are incomplete or contradict each other.

    Comm: none.
    """
    environ = os.environ if environ is None else environ
    if _has_group():
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
        return World(rank, world_size, _integer(environ, "LOCAL_RANK", rank), launched=True)
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return World()
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
    if missing:
        given = ", ".join(f"{n}={environ[n]}" for n in ("RANK", "WORLD_SIZE") if n in environ)
        raise LayoutError(
            f"the launcher's environment: {given}", f"{missing[0]} is not set", _START_WITH_TORCHRUN
        )
    rank = _integer(environ, "RANK", 0)
    found = World(
        rank,
        _integer(environ, "WORLD_SIZE", 1),
        _integer(environ, "LOCAL_RANK", rank),
        launched=True,
    )
    if not 0 <= found.rank < found.world_size or found.local_rank < 0:
        raise LayoutError(
            f"the launcher's environment: RANK={found.rank}, WORLD_SIZE={found.world_size}, "
            f"LOCAL_RANK={found.local_rank}",
            f"ranks run from 0 to WORLD_SIZE - 1 = {found.world_size - 1}",
            _START_WITH_TORCHRUN,
        )
    return found


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where plait keeps what can be computed again: `$XDG_CACHE_HOME/plait`, or `~/.cache/plait`.

    Args:
        environ: Where to read XDG_CACHE_HOME and HOME; None reads the environment.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "."), ".cache")
    return Path(base) / "plait"


_START_WITH_TORCHRUN = (
    "start the script with torchrun --nproc-per-node N",
    "unset RANK and WORLD_SIZE to run one process",
)


def _has_group() -> bool:
    """Whether torch.distributed is initialised; without importing torch to find out."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LayoutError(
            f"the launcher's environment: {name}={text!r}",
            f"{name} must be an integer",
            _START_WITH_TORCHRUN,
        ) from None
