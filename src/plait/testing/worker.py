"""What runs inside one rank of a pool: join a group, run a job, report, reset, wait.

The parent drives each rank over a pipe. Per job it sends two byte strings, the job's
[`Job`][plait.testing.jobs.Job] and the pickled arguments, and receives one
[`Outcome`][plait.testing.jobs.Outcome]. An end of file on the pipe ends the rank.
"""

import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from plait.testing import jobs, typecheck

# Kept for the life of the rank: faulthandler writes to the descriptor from a signal handler.
_open_files: list[Any] = []


def main(conn: Connection, settings: jobs.Settings) -> None:
    """Serve jobs until the pipe closes. Runs on one rank; the parent holds the other end."""
    _prepare_process(settings)
    conn.send_bytes(b"ready")
    group: jobs.Group | None = None
    pristine = dict(os.environ)
    while True:
        try:
            job: jobs.Job = pickle.loads(conn.recv_bytes())
            arguments = conn.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            if job.group != group:
                # Forgotten first: a group that fails to form leaves this rank without one.
                leave, group = group, None
                _change_group(leave, job.group, settings.rank)
                group = job.group
            outcome = _run(job, arguments, settings.rank)
        except BaseException as error:
            outcome = _failure(error)
        try:
            conn.send_bytes(_dump(outcome))
        except (BrokenPipeError, OSError):
            break
        _reset(pristine)
    # Without the interpreter's own shutdown: a peer may be gone, and gloo would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _prepare_process(settings: jobs.Settings) -> None:
    _redirect_output(settings.log_path)
    stacks = open(settings.stacks_path, "w")
    _open_files.append(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    threading.Thread(target=_die_with_parent, daemon=True).start()
    sys.path[:] = settings.sys_path
    if settings.typecheck:
        typecheck.install()
    if settings.torch:
        import torch

        torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    random.seed(0)


def _redirect_output(log_path: str) -> None:
    """Send file descriptors 1 and 2 to this rank's own file, C++ output included."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")


def _die_with_parent() -> None:
    """A rank that hangs in a collective does not see its pipe close, so a thread watches."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _change_group(old: jobs.Group | None, new: jobs.Group | None, rank: int) -> None:
    if old is not None and old.backend is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    if new is None:
        return
    for name, value in new.environment(rank).items():
        os.environ[name] = value
    if new.backend is not None:
        import torch.distributed as dist

        dist.init_process_group(
            new.backend,
            store=dist.FileStore(new.store_path, new.world_size),
            rank=rank,
            world_size=new.world_size,
            timeout=datetime.timedelta(seconds=new.timeout_s),
        )


def _run(job: jobs.Job, arguments: bytes, rank: int) -> jobs.Outcome:
    if job.group is not None:
        os.environ.update(job.group.environment(rank))
    function = jobs.find(job)
    kwargs: dict[str, Any]
    args, kwargs = pickle.loads(arguments)
    undo = _rank_fixtures(job, kwargs, rank)
    _seed()  # here, since importing the test's module may have drawn random numbers
    started = time.perf_counter()
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        outcome = _failure(error)
    else:
        outcome = jobs.Outcome("passed", value=value if job.wants_value else None)
    finally:
        undo()
    outcome.seconds = time.perf_counter() - started
    outcome.sequence = _sequence_number()
    return outcome


def _rank_fixtures(job: jobs.Job, kwargs: dict[str, Any], rank: int) -> Callable[[], None]:
    """Fill in the arguments that differ per rank or live in the rank; return their undo."""
    if "rank" in job.local_arguments:
        kwargs["rank"] = rank
    if "monkeypatch" in job.local_arguments:
        import pytest

        patch = kwargs["monkeypatch"] = pytest.MonkeyPatch()
        return patch.undo
    return lambda: None


def _sequence_number() -> int | None:
    """How many collectives the default group has seen: ranks that disagree are out of step."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def _failure(error: BaseException) -> jobs.Outcome:
    outcomes: Any = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, outcomes.Skipped):
        return jobs.Outcome("skipped", text=str(error))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next  # begin where the test's own code begins
    text = "".join(traceback.format_exception(type(error), error, frames))
    return jobs.Outcome("failed", text=text, summary=_one_line(error), error=_portable(error))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _portable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _dump(outcome: jobs.Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        text = f"the return value cannot be sent to the parent: {error}"
        return pickle.dumps(jobs.Outcome("failed", text=text, summary=text))


def _seed() -> None:
    """The same random numbers for every test and on every rank."""
    random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(0)


def _reset(pristine: dict[str, str]) -> None:
    """Leave nothing behind for the next test: dtype, grad mode, environment, garbage."""
    if os.environ != pristine:
        os.environ.clear()
        os.environ.update(pristine)
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        import torch

        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what survives, modules and their caches above all, is not looked at again
