"""Run a function on n fresh local ranks and return what each one returned."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.errors import RankError
from plait.testing import jobs, reports
from plait.testing.pool import GRACE_S, Pool


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    check: bool = True,
    grace: float = GRACE_S,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `n` new processes that form one process group.

    The processes end with the call, so `fn` may kill its own rank, leave the group in disorder or
    change global state. `fn` must be importable: a function at the top level of a module, or of a
    script whose own work is under `if __name__ == "__main__":`.

    Args:
        fn: What every rank runs; it asks `torch.distributed` for its rank.
        n: Number of ranks, at least 1.
        *args: Picklable arguments, the same for every rank.
        timeout: Seconds after which ranks still running are killed and reported.
        backend: Process group to initialise. None initialises none: the ranks find the
            environment that torchrun sets up, for code that does the initialisation itself.
        check: Raise if any rank fails. False returns an `Outcome` per rank instead of its value.
        grace: Seconds the other ranks may go on after one has failed or died; raise it to see
            how they learn of it.
        env: Environment variables to set in the ranks.

    Returns:
        The return values in rank order (with `check=False` the outcomes).

    Raises:
        RankError: A rank raised, died or did not finish; carries every rank's traceback and the
            number of the first such rank. The rank's own exception, where it can be sent, is
            the `__cause__`.

    Comm: none of its own; the group's rendezvous goes through a file (through a store held by
        this process with `backend=None`).
    """
    with tempfile.TemporaryDirectory(prefix="plait-ranks-") as directory, Pool(timeout) as pool:
        extra, _store = _torchrun_environment(n) if backend is None else ({}, None)
        group = jobs.Group(
            n,
            str(Path(directory) / "store"),
            backend=backend,
            timeout_s=timeout,
            extra=tuple({**extra, **(env or {})}.items()),
        )
        job = jobs.Job(*_address(fn), group=group, wants_value=True)
        outcomes = pool.run(job, n, args=args, timeout_s=timeout, grace_s=grace)
    if not check:
        return list(outcomes)
    failed = reports.failed_ranks(outcomes)
    if failed:
        raise RankError(
            f"{fn.__qualname__} on {n} ranks", reports.describe(outcomes), rank=failed[0]
        ) from outcomes[failed[0]].error
    return [outcome.value for outcome in outcomes]


def _address(fn: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module, file and name under which another process finds `fn`."""
    module, qualname = fn.__module__, fn.__qualname__
    if "<locals>" in qualname or "<lambda>" in qualname:
        raise ValueError(f"{qualname} is local to a function; ranks can only import from a module")
    path = getattr(sys.modules.get(module), "__file__", None)
    # multiprocessing has imported the caller's script in the rank and named it `__main__` too.
    return module, None if module == "__main__" else path, qualname


def _torchrun_environment(n: int) -> tuple[dict[str, str], Any]:
    """The rendezvous variables, and the store this process keeps open at the port they name.

    The port is the one the operating system gave the store, as under torchrun.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }, store
