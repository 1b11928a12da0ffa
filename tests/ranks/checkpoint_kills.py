"""Kills ranks at every step of a save, and looks at what the disk holds; run by the tests.

The parent has torch loaded and forks the ranks, so that a try costs a fraction of a second. A rank
counts its calls of what changes the disk, and kills itself with SIGKILL at a chosen one: nothing
that Python would do at an end is done.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.checkpoint import folders, latest, load, save
from plait.run import process_group

WATCHED = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "write", "close")
"""Functions of `os` at which a rank may die; and the opening and writing of files beside them."""

LIMIT_S = 60.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def dies_at(call: int) -> Callable[[], int]:
    """From now on this process dies at its call number `call` of what changes the disk."""
    import builtins

    seen = 0

    def watched(original: Any) -> Any:
        def call_or_die(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return original(*args, **kwargs)

        return call_or_die

    for name in WATCHED:
        setattr(os, name, watched(getattr(os, name)))
    builtins.open = watched(builtins.open)
    from plait.checkpoint import files

    files._Hashing.write = watched(files._Hashing.write)  # type: ignore[method-assign]
    return lambda: seen


def trained(world: int) -> tuple[nn.Module, Any]:
    model = Net()
    if world > 1:
        plan = {"up": "colwise", "down": "rowwise"}
        plait.parallelize(model, tp_plan=plan, check=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def a_step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def one_rank(
    folder: Path, rank: int, world: int, victim: int, call: int, asynchronous: bool
) -> None:
    """Two checkpoints are there; the third is being saved when the victim dies."""
    if world > 1:
        process_group.TIMEOUT_S = 20.0
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world
        )
    from plait.checkpoint import background

    background.STALL_S = 1.0
    model, optimizer = trained(world)
    for _ in range(2):
        a_step(model, optimizer)
        save(folder, model, optimizer, keep=2)
    a_step(model, optimizer)
    count = dies_at(call) if rank == victim else (lambda: 0)
    found = save(folder, model, optimizer, keep=2, asynchronous=asynchronous)
    if asynchronous:
        found.wait()
    if rank == victim:
        Path(f"{folder}.count").write_text(str(count()))


def in_fork(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        with open("/dev/null" if os.environ.get("QUIET") else "/dev/stderr", "a") as out:
            traceback.print_exc(file=out)
    finally:
        os._exit(code)


def ended(pids: list[int]) -> list[int]:
    """The exit codes; what does not end is killed and is a failure of the test."""
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("a rank did not end after another was killed")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def reads(folder: Path) -> None:
    """The latest checkpoint loads, in a process of its own, and is one of those that were saved."""
    expected = trained(1)
    states = []
    for _ in range(3):
        a_step(*expected)
        states.append({n: x.clone() for n, x in expected[0].state_dict().items()})
    model, optimizer = trained(1)
    found = load(folder, model, optimizer)
    path = latest(folder)
    assert path is not None and found.path == path and found.step in (1, 2), path
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, states[found.step][name])
    assert all(s["step"] == found.step + 1 for s in optimizer.state.values())
    a_step(model, optimizer)
    save(folder, model, optimizer, keep=2)
    assert len(list(folder.iterdir())) == 2, "what the killed run left is gone"


def attempt(where: Path, world: int, victim: int, call: int, asynchronous: bool) -> str:
    """One run and its end: "killed", or "survived" where there were fewer calls."""
    name = f"{world}-{victim}-{call}-{asynchronous}"
    folder = where / name
    args = (folder, world, victim, call, asynchronous)
    pids = [
        in_fork(lambda rank=rank: one_rank(args[0], rank, *args[1:]))  # type: ignore[misc]
        for rank in range(world)
    ]
    codes = ended(pids)
    survived = codes[victim] == 0
    assert codes[victim] in (0, -signal.SIGKILL), (name, codes)
    assert not survived or codes == [0] * world, (name, codes)
    newest = folders.step_of(latest(folder) or Path("step-00000000"))
    assert not survived or newest == 2, "a save that returned is there"
    assert ended([in_fork(lambda: reads(folder))]) == [0], f"{name}: nothing loads"
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}.store")
    return "survived" if survived else "killed"


def calls_of(where: Path, world: int, victim: int, asynchronous: bool) -> int:
    """How many calls a save has in which a rank can die."""
    assert attempt(where, world, victim, 1 << 30, asynchronous) == "survived"
    return int(next(where.glob("*.count")).read_text())


def points(count: int, most: int) -> Iterator[int]:
    """At most so many of the calls 1 … count, evenly, with the last ones: there it is renamed."""
    step = max(1, -(-count // most))
    yield from sorted({*range(1, count + 1, step), *range(max(1, count - 4), count + 1)})


def main(where: Path, world: int, most: int, asynchronous: bool, seconds: float) -> None:
    """Kills every rank at many points; prints how often."""
    torch.set_num_threads(1)
    warm = where / "warm"  # imports what the first step and save import, once for all forks
    a_step(*(trained_here := trained(1)))
    save(warm, *trained_here)
    load(warm, *trained_here)
    import plait.loss  # noqa: F401

    killed = 0
    until = time.monotonic() + seconds
    for victim in range(world):
        for old in where.glob("*.count"):
            old.unlink()
        count = calls_of(where, world, victim, asynchronous)
        for call in points(count, most):
            killed += attempt(where, world, victim, call, asynchronous) == "killed"
            if time.monotonic() > until:
                break
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4] == "asynchronous",
        float(sys.argv[5]),
    )
