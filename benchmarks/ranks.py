"""Rank processes that sleep until they are asked, and the clocks around what they then do.

Contenders are measured in turn (A B C, A B C, …) in one run. Each has its own processes, which wait
in a read of a pipe, at no cost, while another contender is measured; so the machine's other load
meets all of them alike, and ratios of one round compare like with like.
"""

import contextlib
import gc
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Loaded once by the fork server, so that a rank starts in milliseconds.
PRELOAD = (
    "torch",
    "torch.distributed.tensor.parallel",
    "transformers",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class Sample:
    """What one measurement took: of one rank, or (`of_ranks`) of all.

    Attributes:
        cpu_s: Processor seconds, user and system, of all threads; waiting in a spin counts.
        wall_s: Seconds on the clock.
    """

    cpu_s: float
    wall_s: float

    @staticmethod
    def of_ranks(samples: Sequence["Sample"]) -> "Sample":
        """Processor seconds add up; the last rank decides the wall time."""
        return Sample(sum(s.cpu_s for s in samples), max(s.wall_s for s in samples))


class Ranks:
    """Processes that each hold one subject, made by `make(*args)` on every rank.

    Args:
        size: Number of ranks; 1 has no process group.
        make: Function at the top level of a module; what it returns is the subject.
        *args: Picklable arguments of `make`.
    """

    def __init__(self, size: int, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        store = str(Path(self._directory.name) / "store")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, store, make, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers(timeout_s=600)
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *args: Any, timeout_s: float = 600) -> list[Any]:
        """Call a method of the subject on every rank at once; the answers in rank order."""
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._pipes):
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if not ok:
                    raise RuntimeError(f"rank {rank} failed:\n{answers[rank]}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """What a rank does: make the subject, then answer until the pipe closes."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # what the fork server loaded; collections before a timing are then cheap
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        subject = make(*args)
        pipe.send((True, None))
        while True:
            method, method_args = pipe.recv()
            pipe.send((True, getattr(subject, method)(*method_args)))
    except EOFError:
        pass
    except Exception:
        with contextlib.suppress(OSError):  # another rank's failure may have ended the run
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # a rank whose partner has failed may be unable to leave the group in order


def timed(work: Callable[[], Any], repeats: int = 1) -> Sample:
    """Time `work` on this rank, starting together with the others; per call."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        work()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(cpu_s / repeats, wall_s / repeats)


def reset_peak() -> None:
    """Let the peak of resident memory start from what is resident now."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(field: str) -> int:
    """A line of /proc/self/status, such as VmHWM (peak resident), VmRSS, RssAnon, RssFile."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None, f"/proc/self/status has no {field}"
    return int(match[1]) * 1024


def trim() -> None:
    """Hand freed memory back to the system, so that the next peak is made of live tensors."""
    import ctypes

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def ratios(samples: Sequence[Sample], base: Sequence[Sample], what: str) -> list[float]:
    """`what` of each sample ÷ that of the base's sample of the same round."""
    return [getattr(a, what) / getattr(b, what) for a, b in zip(samples, base, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (min–max)`."""
    low, middle, high = (f(values) for f in (min, statistics.median, max))
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
