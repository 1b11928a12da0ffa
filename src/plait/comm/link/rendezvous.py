"""Making a link: the ranks of a group find out through the group's store whether they can have one.

Every rank publishes where it runs; if all are processes of one user on one x86-64 Linux host (and
in one container), group rank 0 makes the memory and the others map it. Whatever stands in the way
leads all of them to the same answer: no link, torch.distributed then.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from plait.comm.announced import mark_announced
from plait.comm.link import segment, waiting
from plait.comm.link.collectives import Link
from plait.comm.link.meeting import Meeting
from plait.comm.transport import Transport
from plait.errors import RankError

MAX_RANKS = 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Store:
    """The group's store under the prefix of one link."""

    store: dist.Store
    prefix: str
    rank: int
    global_ranks: tuple[int, ...]
    deadline: float
    timeout_s: float

    def put(self, key: str, value: str) -> None:
        self.store.set(f"{self.prefix}/{key}/{self.rank}", value)

    def get(self, key: str, ranks: range) -> list[str]:
        """Wait for a value of every rank of `ranks`."""
        keys = [f"{self.prefix}/{key}/{r}" for r in ranks]
        turn = 0
        while not self.store.check(keys):
            if turn % 16 == 15:
                self._look_around(keys, ranks)
            waiting.pause(turn)
            turn += 1
        return [self.store.get(name).decode() for name in keys]

    def _look_around(self, keys: list[str], ranks: range) -> None:
        asked = f"the first collective among ranks {list(self.global_ranks)}"
        told = [r for r in ranks if self.store.check([f"{self.prefix}/failed/{r}"])]
        if told:
            problems = [
                f"rank {self.global_ranks[r]}: "
                f"{self.store.get(f'{self.prefix}/failed/{r}').decode()}"
                for r in told
            ]
            raise mark_announced(RankError(asked, problems, rank=self.global_ranks[told[0]]))
        absent = [r for r, name in zip(ranks, keys, strict=True) if not self.store.check([name])]
        came = f"{self.prefix}/where"
        for r in absent:
            if self.store.check([f"{came}/{r}"]):
                pid, born = json.loads(self.store.get(f"{came}/{r}"))["process"]
                if waiting.birth(pid) != born and _here(r, self.store, came, self.rank):
                    name = self.global_ranks[r]
                    error = RankError(asked, f"the process of rank {name} has ended", rank=name)
                    raise mark_announced(error)
        if absent and time.monotonic() > self.deadline:
            names = ", ".join(str(self.global_ranks[r]) for r in absent)
            error = RankError(
                asked,
                f"rank {names} did not come within {self.timeout_s:g} s",
                "see what that rank is doing: ranks must take the same path through the program",
                rank=self.global_ranks[absent[0]],
            )
            self.put("failed", f"gave up waiting for rank {names}")
            raise mark_announced(error)


def _here(r: int, store: dist.Store, came: str, rank: int) -> bool:
    """Whether rank `r` runs where this rank does, so that its process number means anything."""
    places = [json.loads(store.get(f"{came}/{q}"))["place"] for q in (r, rank)]
    return bool(places[0] == places[1])


def make_link(
    process_group: dist.ProcessGroup,
    global_ranks: tuple[int, ...],
    timeout_s: float,
    other: Transport,
) -> Link | None:
    """Make the link of a group, all its ranks together.

    Args:
        process_group: The group; its backend for CPU tensors is gloo.
        global_ranks: The global rank of each group rank.
        timeout_s: How long to wait for a rank that does not come.
        other: What carries tensors that are not on the CPU.

    Returns:
        The link, or None on every rank if the ranks cannot share memory.

    Raises:
        RankError: A rank died, announced a failure or did not come in time.
    """
    store = _store_of(process_group)
    if store is None or len(global_ranks) > MAX_RANKS:
        return None
    rank = process_group.rank()
    meeting_place = _Store(
        store,
        f"plait/link/{store.add(f'plait/link/made/{rank}', 1)}",
        rank,
        global_ranks,
        time.monotonic() + timeout_s,
        timeout_s,
    )
    try:
        return _make(meeting_place, timeout_s, other)
    except KeyboardInterrupt:
        meeting_place.put("failed", "was interrupted")
        raise
    except dist.DistError as error:
        raise RankError(
            f"the first collective among ranks {list(global_ranks)}",
            f"the store of the process group failed: {str(error).splitlines()[0]}",
            "look at the first error of the other ranks",
        ) from error


def announce(process_group: dist.ProcessGroup, message: str) -> bool:
    """Tell ranks that are making, or will make, the link of a group that this one failed."""
    store = _store_of(process_group)
    if store is None:
        return False
    rank = process_group.rank()
    try:
        turn = store.add(f"plait/link/made/{rank}", 1)
        store.set(f"plait/link/{turn}/failed/{rank}", message)
    except dist.DistError:  # the process that holds the store is gone, and the ranks with it
        return False
    return True


def _make(meeting_place: _Store, timeout_s: float, other: Transport) -> Link | None:
    size = len(meeting_place.global_ranks)
    everyone = range(size)
    meeting_place.put("where", json.dumps({"place": _place(), "process": _process()}))
    infos = [json.loads(text) for text in meeting_place.get("where", everyone)]
    places = {info["place"] for info in infos}
    if len(places) > 1 or "" in places:
        return None
    descriptor = None
    if meeting_place.rank == 0:
        descriptor = _try(lambda: segment.create(size))
        path = "" if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}"
        meeting_place.put("path", path)
    path = meeting_place.get("path", range(1))[0]
    if meeting_place.rank != 0 and path:
        descriptor = _try(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC))
    memory = None
    if descriptor is not None:
        mapped = descriptor
        memory = _try(lambda: segment.Segment(mapped, size))
    meeting_place.put("mapped", "no" if memory is None else "yes")
    answers = meeting_place.get("mapped", everyone)
    if descriptor is not None:
        os.close(descriptor)
    if memory is None or "no" in answers:
        return None
    processes = [(info["process"][0], info["process"][1]) for info in infos]
    ranks = meeting_place.global_ranks
    return Link(Meeting(memory, meeting_place.rank, ranks, processes, timeout_s), other)


def _try(action: Callable[[], _T]) -> _T | None:
    try:
        return action()
    except (OSError, ValueError):
        return None


def _place() -> str:
    """A name of this host, container and user; empty where no link can be made."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def _process() -> tuple[int, int]:
    return os.getpid(), waiting.birth(os.getpid()) or 0


def _store_of(process_group: dist.ProcessGroup) -> dist.Store | None:
    """The store torch made for the group; None for backends without one that is shared."""
    backend, store = dist.distributed_c10d._world.pg_map.get(process_group, (None, None))
    return store if backend is not None and "gloo" in str(backend) else None
