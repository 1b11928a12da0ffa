"""Steps of a link: every rank writes, says so, and waits until all have said so.

A step has a number, and its parity names the half of the slots it uses. In a step a rank
1. writes its slot (and, in a collective's first step, its header),
2. publishes the step number,
3. waits until every peer has published it, and compares their signatures with its own,
4. reads the peers' slots.

Writing step k + 2 into the slots of step k is safe: a rank gets there only when all have published
step k + 1, which they do after they have read step k. So two halves are enough, and one wait a
step.
"""

import os
import time

from plait.comm.announced import mark_announced
from plait.comm.link import waiting
from plait.comm.link.headers import Header, describe
from plait.comm.link.segment import (
    ALARM,
    ASLEEP,
    CONTROL_WORDS,
    SIGNATURE,
    STEP,
    Segment,
)
from plait.errors import RankError

_SPINS = 1500  # about 60 µs
_YIELDS = 40
_LOOK_AROUND_S = 0.1


class Meeting:
    """The ranks of one link, step by step.

    Attributes:
        segment: The shared memory.
        rank: This rank's place in the group.
        size: Number of ranks.
        timeout_s: How long to wait for a rank that does not come.
        spent: The link has reported a failure and is not to be used again.
        dead: The error to repeat if a rank has died, which no new link can mend.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        global_ranks: tuple[int, ...],
        processes: list[tuple[int, int]],
        timeout_s: float,
    ) -> None:
        self.segment = segment
        self.rank, self.size = rank, len(global_ranks)
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self.spent = False
        self.dead: RankError | None = None
        self._processes = processes
        self._words = segment.words
        self._step = 0
        self._base = rank * CONTROL_WORDS
        self._peers = tuple(r * CONTROL_WORDS for r in range(self.size) if r != rank)
        self._stored: list[Header | None] = [None, None]
        # With more ranks than cores a spinning rank holds up the one it waits for.
        self._spins = range(_SPINS if self.size <= waiting.num_cores() else 20)

    def parity(self) -> int:
        """The half of the slots that the next step uses."""
        return (self._step + 1) & 1

    def meet(self, header: Header) -> None:
        """The first step of a collective: publish, wait for all, compare."""
        step = self._step + 1
        parity = step & 1
        words, base = self._words, self._base
        if self._stored[parity] is not header:
            self.segment.write_header(self.rank, parity, header.row)
            words[base + SIGNATURE + parity] = header.signature
            self._stored[parity] = header
        self._step = step
        words[base + STEP] = step
        signature, where = header.signature, SIGNATURE + parity
        as_one = True
        for peer in self._peers:
            if words[peer + ASLEEP]:
                waiting.wake(self.segment.address + 8 * (base + STEP))
                break
        for peer in self._peers:
            if words[peer] < step:
                self._wait(peer, step, header)
            if words[peer + where] != signature or words[peer + ALARM]:
                as_one = False
        if not as_one:
            # A peer may have given up waiting for this rank; or the ranks want different things.
            # Or a peer has left this step and failed after it, which ends the next one.
            self._raise_alarms(step, header)
            if any(words[peer + where] != signature for peer in self._peers):
                raise self._mismatch(parity)

    def step(self, header: Header) -> None:
        """A further step of the collective: publish and wait for all."""
        step = self._step = self._step + 1
        words, base = self._words, self._base
        words[base + STEP] = step
        for peer in self._peers:
            if words[peer + ASLEEP]:
                waiting.wake(self.segment.address + 8 * (base + STEP))
                break
        for peer in self._peers:
            if words[peer] < step:
                self._wait(peer, step, header)

    def header_of(self, rank: int) -> list[int]:
        """The header of a rank in the step just met (its row is whole until the next step)."""
        return self.segment.read_header(rank, self._step & 1)

    def announce(self, message: str, step: int | None = None) -> None:
        """Tell the peers that this rank has failed.

        Args:
            message: What happened.
            step: The first step the peers cannot count on. By default the one after the last: a
                peer that is still on its way out of that one gets out, as this rank did.
        """
        if self.spent:
            return
        self.spent = True
        self.segment.write_message(self.rank, message)
        self._words[self._base + ALARM] = self._step + 1 if step is None else step
        waiting.wake(self.segment.address + 8 * (self._base + STEP))

    def close(self) -> None:
        """Let go of the shared memory."""
        self.spent = True
        self.segment.close()
        self._words = self.segment.words

    def _wait(self, peer: int, step: int, header: Header) -> None:
        words = self._words
        try:
            for _ in self._spins:
                if words[peer] >= step:
                    return
            for _ in range(_YIELDS):
                os.sched_yield()
                if words[peer] >= step:
                    return
            self._wait_long(peer, step, header)
        except RankError:
            raise
        except BaseException:
            # The wait was interrupted from outside; nobody can rely on this rank any more.
            me = self.global_ranks[self.rank]
            self.announce(f"rank {me} was interrupted in {describe(header.row)}", step)
            raise

    def _wait_long(self, peer: int, step: int, header: Header) -> None:
        words, base = self._words, self._base
        address = self.segment.address + 8 * (peer + STEP)
        start = time.monotonic()
        next_look = start + _LOOK_AROUND_S
        nap = 0.002
        while True:
            words[base + ASLEEP] = 1
            now_at = words[peer]
            if now_at < step:
                waiting.sleep_on(address, now_at, nap)
            words[base + ASLEEP] = 0
            if words[peer] >= step:
                return
            nap = min(nap * 1.5, 0.02)
            now = time.monotonic()
            if any(0 < words[other + ALARM] <= step for other in self._peers) or now >= next_look:
                self._look_around(step, header, now - start)
                next_look = now + _LOOK_AROUND_S

    def _look_around(self, step: int, header: Header, waited_s: float) -> None:
        """Raise if a peer has died, has announced a failure, or is not going to come."""
        # Process numbers are used again: one that was born at another time is not the rank.
        dead = [r for r in self._absent(step) if not self._lives(r)]
        if dead:
            raise self._death(dead, step, header)
        self._raise_alarms(step, header)
        if waited_s > self.timeout_s:
            raise self._absence(step, header, waited_s)

    def _lives(self, rank: int) -> bool:
        pid, born = self._processes[rank]
        return waiting.birth(pid) == born

    def _raise_alarms(self, step: int, header: Header) -> None:
        """Raise what peers have announced that ends this step."""
        alarms = [self._words[r * CONTROL_WORDS + ALARM] for r in range(self.size)]
        told = [r for r, first in enumerate(alarms) if 0 < first <= step]
        if told:
            self.spent = True
            problems = [
                f"rank {self.global_ranks[r]}: {self.segment.read_message(r)}" for r in told
            ]
            rank = self.global_ranks[told[0]]
            raise mark_announced(RankError(self._asked(header), problems, rank=rank))

    def _absent(self, step: int) -> list[int]:
        return [r for r in range(self.size) if self._words[r * CONTROL_WORDS + STEP] < step]

    def _asked(self, header: Header) -> str:
        me = self.global_ranks[self.rank]
        return f"{describe(header.row)} among ranks {list(self.global_ranks)}, on rank {me}"

    def _death(self, dead: list[int], step: int, header: Header) -> RankError:
        names = ", ".join(str(self.global_ranks[r]) for r in dead)
        error = RankError(
            self._asked(header),
            [f"the process of rank {self.global_ranks[r]} has ended" for r in dead],
            f"look at the output of rank {names}; a rank killed for memory leaves none "
            "(see the kernel's log)",
            rank=self.global_ranks[dead[0]],
        )
        self.announce(f"gave up because the process of rank {names} has ended", step)
        self.dead = mark_announced(error)
        return error

    def _absence(self, step: int, header: Header, waited_s: float) -> RankError:
        absent = self._absent(step)
        names = ", ".join(str(self.global_ranks[r]) for r in absent)
        error = RankError(
            self._asked(header),
            f"rank {names} did not come within {waited_s:.1f} s (the limit is "
            f"{self.timeout_s:g} s); it is alive",
            (
                "see what that rank is doing: ranks must take the same path through the program",
                "raise the limit if it is only slow",
            ),
            rank=self.global_ranks[absent[0]] if absent else None,
        )
        self.announce(f"gave up waiting for rank {names} in {describe(header.row)}", step)
        return mark_announced(error)

    def _mismatch(self, parity: int) -> RankError:
        rows = [self.segment.read_header(r, parity) for r in range(self.size)]
        signatures = [self._words[r * CONTROL_WORDS + SIGNATURE + parity] for r in range(self.size)]
        # The odd ones out are those that differ from the most common wish.
        common = max(signatures, key=signatures.count)
        odd = [r for r in range(self.size) if signatures[r] != common]
        problems = []
        for r, row in enumerate(rows):
            text = describe(row)
            if row[0] == 0:
                text = self.segment.read_message(r)
            problems.append(f"rank {self.global_ranks[r]}: {text}")
        error = RankError(
            f"one collective among ranks {list(self.global_ranks)}, but the ranks differ",
            problems,
            "give every rank the same input shapes, dtypes and path through the program",
            rank=self.global_ranks[odd[0]],
        )
        return mark_announced(error)
