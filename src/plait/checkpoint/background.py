"""Saving while training goes on: a thread writes, and the ranks' threads meet by files.

They may not meet by collectives, which belong to the training. Each rank leaves a report of its
part in the folder; the first rank commits when all are there, and the others see it appear.
"""

import atexit
import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from plait.checkpoint import writing
from plait.checkpoint.files import FileRecord
from plait.checkpoint.manifest import Chunk
from plait.checkpoint.writing import Job, Report
from plait.errors import RankError

STALL_S = 60.0
"""How long a rank's thread waits while no other shows that it is alive.

A rank that writes shows it all the time, however slow its disk is; one that is gone does not.
"""

_POLL_S = 0.02
_BEATS = 10
"""How often, in the time of `STALL_S`, a rank that is writing says so."""

_log = logging.getLogger("plait")


class Saving:
    """A checkpoint that a thread is writing.

    Attributes:
        path: The checkpoint, once it is complete.
    """

    def __init__(self, job: Job) -> None:
        self.path = job.final
        self._failure: BaseException | None = None
        self._process = os.getpid()
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, args=(job,), name="plait checkpoint")

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until it is complete.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: It could not be written; the checkpoints before it are as they were.
            RankError: Another rank could not write its part, or is gone.

        Comm: none.
        """
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self.path

    def _run(self, job: Job) -> None:
        try:
            _write(job)
        except BaseException as error:
            self._failure = error


_current: Saving | None = None


def start(job: Job) -> Saving:
    """Starts to write; the last one has been waited for."""
    global _current
    _current = Saving(job)
    _current._thread.start()
    return _current


def finish() -> None:
    """Waits for the save that is under way, if there is one, and raises what it has to tell."""
    global _current
    last, _current = _current, None
    if last is not None:
        last.wait()


@atexit.register
def _tell_at_exit() -> None:
    """Reports a failure that nobody has waited for, and lets the process end with code 1.

    Registered when plait is imported, so that what a program registers itself has run before.
    """
    last = _current
    if last is None or last._process != os.getpid():  # the parent's, after a fork
        return
    last._thread.join()
    failure = last._failure
    if failure is None:
        return
    _log.critical(
        "The last asynchronous save failed and nobody waited for it: %s was NOT saved. The process "
        "ends with code 1.",
        last.path,
        exc_info=failure,
    )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)  # nothing else in a function of atexit changes the code


def _write(job: Job) -> None:
    with _alive(job.partial):
        report = _write_part(job)
        if job.place.num_ranks == 1:
            try:
                writing.commit(job, [report])
            except BaseException:
                shutil.rmtree(job.partial, ignore_errors=True)
                raise
            return
        _leave(job.partial, job.place.index, report)
    if not job.place.is_first:
        _await(job, lambda: job.final.exists() or not job.partial.exists())
        if not job.final.exists():
            raise RankError(job.asked, "rank 0 of the layout gave the checkpoint up", rank=0)
        return
    names = [_report_name(rank) for rank in range(job.place.num_ranks)]
    _await(job, lambda: all((job.partial / name).exists() for name in names))
    with _alive(job.partial):
        reports = [_taken(job.partial / name) for name in names]
        try:
            writing.commit(job, reports)
        except Exception as error:
            _leave(job.partial, job.place.index, error=f"{type(error).__name__}: {error}")
            raise


def _write_part(job: Job) -> Report:
    try:
        return writing.write_part(job)
    except Exception as error:
        _leave(job.partial, job.place.index, error=f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def _alive(folder: Path) -> Iterator[None]:
    """Touches the folder again and again, so that the others see that this process is there."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(STALL_S / _BEATS):
            with contextlib.suppress(OSError):  # renamed: the checkpoint is complete
                os.utime(folder)

    thread = threading.Thread(target=beat, name="plait checkpoint is alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _await(job: Job, arrived: Callable[[], bool]) -> None:
    """Waits for other ranks, as long as one of them writes."""
    seen, since = _grown(job.partial), time.monotonic()
    while not arrived():
        _raise_failure(job)
        time.sleep(_POLL_S)
        if time.monotonic() - since > STALL_S:
            now = _grown(job.partial)
            if now == seen and not arrived():
                raise RankError(
                    job.asked, f"for {STALL_S:g} s no rank has been writing to the checkpoint"
                )
            seen, since = now, time.monotonic()


def _raise_failure(job: Job) -> None:
    for path in job.partial.glob("failure-*.json"):
        try:
            told = json.loads(path.read_text())
        except OSError:  # deleted meanwhile
            continue
        rank = told["rank"]
        raise RankError(job.asked, f"rank {rank} failed: {told['error']}", rank=rank)


def _grown(folder: Path) -> list[tuple[str, int]]:
    """What changes while a rank writes: the files, their sizes, and when the folder was touched."""
    found = []
    with contextlib.suppress(OSError):
        found.append(("", os.stat(folder).st_mtime_ns))
        for entry in os.scandir(folder):
            found.append((entry.name, entry.stat().st_size))
    return sorted(found)


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


def _leave(folder: Path, rank: int, report: Report | None = None, error: str = "") -> None:
    """Puts a report, or a failure, where the other ranks' threads look for it."""
    if report is None:
        name, content = f"failure-{rank:05d}.json", {"rank": rank, "error": error}
    else:
        name, content = _report_name(rank), asdict(report)
    partial = folder / f".{name}.partial"
    with contextlib.suppress(OSError) if report is None else contextlib.nullcontext():
        partial.write_text(json.dumps(content))
        os.replace(partial, folder / name)


def _taken(path: Path) -> Report:
    content = json.loads(path.read_text())
    path.unlink()
    files = {name: FileRecord(**file) for name, file in content["files"].items()}
    chunks = {
        key: [
            Chunk((tuple(c["box"][0]), tuple(c["box"][1])), c["file"], c["offset"], c["nbytes"])
            for c in found
        ]
        for key, found in content["chunks"].items()
    }
    return Report(files, chunks)
