"""A pool of processes that live across tests: worker i is always rank i.

Starting a process that has imported torch takes seconds; joining a process group takes
milliseconds. So the workers stay, and what changes between tests is only the group. A test on n
ranks runs on the first n workers; the others sleep on their pipes. After any failure the workers
are replaced, because a rank that raised may have left its peers in the middle of a collective.
"""

import contextlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from plait.testing import jobs, typecheck, worker

GRACE_S = 1.0
"""Default for how long the other ranks may go on after one has failed or died."""

START_TIMEOUT_S = 120.0
"""How long a worker may take to start; the first of a process waits for torch to be imported."""

_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Pool:
    """Ranks that run one function after another.

    Workers start when a job first needs them, and again after a failure. Use as a context
    manager, or call [`close`][plait.testing.pool.Pool.close].

    Args:
        timeout_s: Limit for a job that brings none of its own.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.num_starts = 0  # workers started so far, for tests of the pool itself
        self._directory = Path(tempfile.mkdtemp(prefix="plait-pool-"))
        self._workers: list[_Worker] = []
        self._group: jobs.Group | None = None
        self._num_groups = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        job: jobs.Job,
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        grace_s: float = GRACE_S,
    ) -> list[jobs.Outcome]:
        """Run a job on ranks 0 … world_size − 1 and wait for all of them.

        Args:
            job: What to run; its group is filled in here unless it brings one.
            world_size: Number of ranks.
            args: Positional arguments, pickled once for all ranks.
            kwargs: Keyword arguments, likewise.
            timeout_s: Seconds after which ranks still running are dumped and killed.
            grace_s: Seconds the other ranks may go on after one has failed or died.

        Returns:
            One outcome per rank, in rank order. Never raises for what a rank did.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        arguments = pickle.dumps((tuple(args), dict(kwargs or {})))
        self._grow(world_size)
        if job.group is None:
            job = replace(job, group=self._group_of(world_size))
        message = pickle.dumps(job)
        ranks = self._workers[:world_size]
        for one in ranks:
            one.clear_files()
        for one in ranks:
            one.send(message, arguments)
        outcomes = _collect(ranks, limit_s, grace_s)
        for one, outcome in zip(ranks, outcomes, strict=True):
            outcome.output = one.output()
        if _out_of_step(outcomes):
            self.stop()
        return outcomes

    def stop(self) -> None:
        """Kill the workers. The next job starts fresh ones."""
        for one in self._workers:
            one.kill()
        self._workers.clear()
        self._group = None

    def close(self) -> None:
        """End the workers and remove the pool's files."""
        for one in self._workers:
            one.conn.close()
        deadline = time.monotonic() + 1.0
        for one in self._workers:
            one.process.join(max(0.0, deadline - time.monotonic()))
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers, in rank order."""
        return [one.process.pid or -1 for one in self._workers]

    def _grow(self, world_size: int) -> None:
        if any(one.is_lost() for one in self._workers):
            self.stop()
        started = []
        while len(self._workers) < world_size:
            self.num_starts += 1
            self._workers.append(_Worker.start(len(self._workers), self._directory))
            started.append(self._workers[-1])
        for one in started:  # imports do not count against a job's limit
            one.wait_until_ready()

    def _group_of(self, world_size: int) -> jobs.Group:
        """The current group when it has the right size, else a new one at a new file."""
        if self._group is None or self._group.world_size != world_size:
            self._num_groups += 1
            path = self._directory / f"store-{self._num_groups}"
            self._group = jobs.Group(world_size, str(path))
        return self._group


class _Worker:
    """The parent's view of one rank."""

    def __init__(
        self, process: mp.process.BaseProcess, conn: connection.Connection, base: Path
    ) -> None:
        self.process = process
        self.conn = conn
        self.base = base

    @classmethod
    def start(cls, rank: int, directory: Path) -> "_Worker":
        base = directory / f"rank-{rank}"
        settings = jobs.Settings(
            rank=rank,
            sys_path=tuple(sys.path),
            log_path=f"{base}.log",
            stacks_path=f"{base}.stacks",
            typecheck=typecheck.installed(),
        )
        context = start_method()
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker.main, args=(theirs, settings), name=f"plait-rank-{rank}", daemon=True
        )
        with _environment(_THREADS):
            process.start()
        theirs.close()
        return cls(process, ours, base)

    def is_lost(self) -> bool:
        """Whether this idle worker is gone; its pipe tells before the fork server does."""
        return self.conn.poll(0) or not self.process.is_alive()

    def wait_until_ready(self) -> None:
        """Wait for the worker's imports; a worker that dies of them is noticed while collecting."""
        if not self.conn.poll(START_TIMEOUT_S):
            raise TimeoutError(f"{self.process.name} did not start within {START_TIMEOUT_S:g} s")
        with contextlib.suppress(EOFError, ConnectionError):
            self.conn.recv_bytes()

    def send(self, *messages: bytes) -> None:
        # A worker that died since is noticed while collecting.
        with contextlib.suppress(BrokenPipeError, OSError):
            for message in messages:
                self.conn.send_bytes(message)

    def clear_files(self) -> None:
        for suffix in (".log", ".stacks"):
            path = f"{self.base}{suffix}"
            if os.path.exists(path) and os.path.getsize(path):
                os.truncate(path, 0)

    def output(self) -> str:
        return _read(f"{self.base}.log")

    def dump_stack(self) -> None:
        """Ask for every thread's Python stack; works inside C++ too."""
        with contextlib.suppress(ProcessLookupError, OSError):
            if self.process.pid is not None and self.process.is_alive():
                os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        return _read(f"{self.base}.stacks")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5.0)
        self.conn.close()

    def how_it_ended(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"left with exit code {code}"


def start_method() -> Any:
    """The multiprocessing context ranks are started with.

    A fork server that has imported torch and transformers where the system has one; elsewhere
    processes that import for themselves.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    preload = ["plait.testing.preload"]
    if typecheck.installed():
        preload.append("plait.testing.preload_checked")
    context.set_forkserver_preload(preload)
    return context


def warm_up() -> None:
    """Start the fork server's imports now, in the background."""
    context = start_method()
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        with _environment(_THREADS):
            forkserver.ensure_running()


def _collect(ranks: list[_Worker], limit_s: float, grace_s: float) -> list[jobs.Outcome]:
    """Wait for all ranks; after the first failure only a little longer."""
    outcomes: dict[int, jobs.Outcome] = {}
    deadline = time.monotonic() + limit_s
    failed = False
    while len(outcomes) < len(ranks):
        open_ranks = [rank for rank in range(len(ranks)) if rank not in outcomes]
        left_s = deadline - time.monotonic()
        ready = connection.wait([ranks[r].conn for r in open_ranks], max(0.0, left_s))
        if not ready:
            break
        for rank in open_ranks:
            if ranks[rank].conn in ready:
                outcomes[rank] = _receive(ranks[rank])
                if outcomes[rank].status in ("failed", "died") and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace_s)
    stuck = [rank for rank in range(len(ranks)) if rank not in outcomes]
    for rank, stack in zip(stuck, _stacks([ranks[r] for r in stuck]), strict=True):
        what = "was still running when another rank failed" if failed else None
        summary = what or f"did not finish within {limit_s:g} s"
        status = "stopped" if failed else "hung"
        outcomes[rank] = jobs.Outcome(status, summary=summary, stack=stack)
    if stuck and not failed:  # where the others are tells why
        done = [rank for rank in range(len(ranks)) if rank not in stuck]
        for rank, stack in zip(done, _stacks([ranks[r] for r in done]), strict=True):
            outcomes[rank].stack = stack
    return [outcomes[rank] for rank in range(len(ranks))]


def _receive(one: _Worker) -> jobs.Outcome:
    try:
        outcome: jobs.Outcome = pickle.loads(one.conn.recv_bytes())
    except (EOFError, ConnectionError):
        summary = one.how_it_ended()
        return jobs.Outcome("died", summary=summary, stack=one.stack())
    except Exception as error:
        return jobs.Outcome("failed", summary=f"its answer cannot be read here: {error}")
    return outcome


def _stacks(ranks: list[_Worker]) -> list[str]:
    """Python stacks of running ranks; waits until they are written."""
    for one in ranks:
        one.dump_stack()
    deadline = time.monotonic() + 5.0
    found = [""] * len(ranks)
    while time.monotonic() < deadline:
        before, found = found, [one.stack() for one in ranks]
        if found == before and all(found):
            break
        time.sleep(0.02)
    return found


def _out_of_step(outcomes: list[jobs.Outcome]) -> bool:
    healthy = all(outcome.status in ("passed", "skipped") for outcome in outcomes)
    return not healthy or len({outcome.sequence for outcome in outcomes}) > 1


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that the caller has not set, for the processes started inside."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
