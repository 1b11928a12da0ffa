"""The collectives of a link, made of steps.

Small tensors take one step: every rank writes its tensor to its slot and reads all of them. Large
sums go chunk by chunk in two steps: each rank adds up one n-th of the chunk, then reads the other
n-ths from its peers. Sums are taken in rank order (16-bit floats in float32, rounded once), so they
are the same on every rank and in every run.
"""

import pickle
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from plait.comm.announced import mark_announced
from plait.comm.link.headers import NUM_BYTES, SHAPE, Header, header
from plait.comm.link.meeting import Meeting
from plait.comm.transport import Op, Transport
from plait.errors import RankError

ONE_STEP_BYTES = 128 << 10
_ALIGN = 16  # elements; shares begin on a cache line
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_MAX_PLANS = 512


class _Plan:
    """A small all-reduce that recurs: its header and the slots as tensors of the right shape."""

    __slots__ = ("header", "slots")

    def __init__(self, head: Header, slots: tuple[list[Tensor], list[Tensor]]) -> None:
        self.header = head
        self.slots = slots


class Link:
    """The collectives of one group through shared memory (see `Transport`)."""

    def __init__(self, meeting: Meeting, other: Transport) -> None:
        self.meeting = meeting
        self.rank, self.size = meeting.rank, meeting.size
        self._other = other
        self._plans: dict[tuple[str, torch.dtype, torch.Size], _Plan] = {}
        self._flat: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def spent(self) -> bool:
        """Whether the link has reported a failure and a new one is to be made."""
        return self.meeting.spent

    def all_reduce(self, x: Tensor, op: Op, out: Tensor | None) -> Tensor:
        """The reduction of every rank's `x`."""
        plan = self._plans.get((op, x.dtype, x.shape))
        if plan is not None and x.is_cpu:
            meeting = self.meeting
            slots = plan.slots[meeting.parity()]
            slots[self.rank].copy_(x)
            meeting.meet(plan.header)
            return _reduce(slots, op, out)
        return self._all_reduce(x, op, out)

    def _all_reduce(self, x: Tensor, op: Op, out: Tensor | None) -> Tensor:
        if not x.is_cpu:
            return self._other.all_reduce(x, op, out)
        if x.is_complex():
            return self._all_reduce_complex(x, op, out)
        head = header("all_reduce", x.dtype, x.shape, op=op)
        if x.numel() * x.element_size() <= self._one_step_bytes():
            plan = _Plan(head, self._shaped(x))
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[op, x.dtype, x.shape] = plan
            return self.all_reduce(x, op, out)
        return self._all_reduce_large(x, op, out, head)

    def _all_reduce_complex(self, x: Tensor, op: Op, out: Tensor | None) -> Tensor:
        pairs = torch.view_as_real(x.resolve_conj().resolve_neg())
        total = torch.view_as_complex(self.all_reduce(pairs, op, None))
        return total if out is None else out.copy_(total)

    def _all_reduce_large(self, x: Tensor, op: Op, out: Tensor | None, head: Header) -> Tensor:
        result = out if out is not None and out.is_contiguous() else _empty_like(x)
        source, target = x.reshape(-1), result.view(-1)
        # A slot holds the peers' shares of a chunk, not the rank's own.
        slot = self.meeting.segment.slot_bytes // x.element_size()
        num_elements = source.numel()
        num_chunks = ceil(num_elements / (slot // (self.size - 1) // _ALIGN * _ALIGN * self.size))
        for start, length in _even_chunks(num_elements, num_chunks):
            share = ceil(length / self.size / _ALIGN) * _ALIGN
            given = source[start : start + length].split(share)
            taken = target[start : start + length].split(share)
            slots = self._slots(x.dtype)
            for r, part in enumerate(given):
                if r != self.rank:
                    self._section(slots, self.rank, r, share, part.numel()).copy_(part)
            self._advance(head, first=start == 0)
            sums = self._slots(x.dtype)
            if self.rank < len(given):
                part = given[self.rank]
                terms = [
                    part
                    if r == self.rank
                    else self._section(slots, r, self.rank, share, part.numel())
                    for r in range(self.size)
                ]
                mine = sums[self.rank][: part.numel()]
                taken[self.rank].copy_(_reduce(terms, op, mine))
            self.meeting.step(head)
            for r, part in enumerate(taken):
                if r != self.rank:
                    part.copy_(sums[r][: part.numel()])
        if out is None or result is out:
            return result
        return out.copy_(result)

    def _section(
        self, slots: list[Tensor], sender: int, receiver: int, share: int, length: int
    ) -> Tensor:
        """Where in its slot a sender puts what one receiver adds up."""
        at = (receiver if receiver < sender else receiver - 1) * share
        return slots[sender][at : at + length]

    def all_gather(
        self, x: Tensor, dim: int, sizes: tuple[int, ...] | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Every rank's `x` along `dim`, and the extents."""
        if not x.is_cpu:
            return self._other.all_gather(x, dim, sizes)
        piece = _flat_bytes(x)
        head = header("all_gather", x.dtype, x.shape, dim=dim, sizes=sizes, num_bytes=piece.numel())
        capacity = self.meeting.segment.slot_bytes
        slots = self._slots(torch.uint8)
        slots[self.rank][: piece.numel()].copy_(piece[:capacity])
        self.meeting.meet(head)
        rows = [self.meeting.header_of(r) for r in range(self.size)]
        lengths = [row[NUM_BYTES] for row in rows]
        extents = tuple(row[SHAPE + dim] for row in rows)
        shape = list(x.shape)
        shape[dim] = sum(extents)
        whole = torch.empty(shape, dtype=x.dtype)
        # Pieces along the outermost dimension are runs of the result; others are put in place
        # after they have arrived whole.
        at_once = dim == 0 or all(n == 1 for n in shape[:dim])
        if at_once:
            pieces = list(_flat_bytes(whole).split(lengths))
        else:
            pieces = [torch.empty(n, dtype=torch.uint8) for n in lengths]
        for start in range(0, max(lengths), capacity) or (0,):
            if start:
                slots = self._slots(torch.uint8)
                chunk = piece[start : start + capacity]
                slots[self.rank][: chunk.numel()].copy_(chunk)
                self.meeting.step(head)
            for r in range(self.size):
                part = (piece if r == self.rank else pieces[r])[start : start + capacity]
                if r != self.rank:
                    part.copy_(slots[r][: part.numel()])
        if at_once:
            pieces[self.rank].copy_(piece)
            return whole, extents
        parts = []
        for r in range(self.size):
            shape[dim] = extents[r]
            parts.append(x if r == self.rank else pieces[r].view(x.dtype).view(shape))
        return torch.cat(parts, dim, out=whole), extents

    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This rank's piece of the sum."""
        if not x.is_cpu:
            return self._other.reduce_scatter(x, dim, sizes)
        if x.is_complex():
            pairs = torch.view_as_real(x.resolve_conj().resolve_neg())
            return torch.view_as_complex(self.reduce_scatter(pairs, dim, sizes))
        head = header("reduce_scatter", x.dtype, x.shape, dim=dim, sizes=sizes)
        pieces = [piece.reshape(-1) for piece in x.split(sizes, dim)]
        own = x.split(sizes, dim)[self.rank]
        result = torch.empty(own.shape, dtype=x.dtype)
        target = result.view(-1)
        # Each slot holds a section for every receiver.
        section = self.meeting.segment.slot_bytes // x.element_size() // self.size
        longest = max(piece.numel() for piece in pieces)
        for start in range(0, longest, section) or (0,):
            slots = self._slots(x.dtype)
            for r, piece in enumerate(pieces):
                chunk = piece[start : start + section]
                if r != self.rank and chunk.numel():
                    slots[self.rank][r * section : r * section + chunk.numel()].copy_(chunk)
            self._advance(head, first=start == 0)
            part = target[start : start + section]
            if part.numel():
                at = self.rank * section
                terms = [slot[at : at + part.numel()] for slot in slots]
                terms[self.rank] = pieces[self.rank][start : start + section]
                _reduce(terms, "sum", part)
        return result

    def all_to_all(self, pieces: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
        """What every rank sends this one."""
        if not pieces[0].is_cpu:
            return self._other.all_to_all(pieces, lengths)
        dtype, own = pieces[0].dtype, self.rank
        sent = [piece.numel() for piece in pieces]
        head = header("all_to_all", dtype, (*sent, *lengths), num_bytes=max(sent))
        result = [torch.empty(n, dtype=dtype) for n in lengths]
        # Each slot holds a section for every receiver; the ranks take as many steps as the longest
        # piece of any of them needs, which the headers tell.
        section = self.meeting.segment.slot_bytes // pieces[0].element_size() // self.size
        longest, start = 1, 0
        while start < longest:
            slots = self._slots(dtype)
            for r, piece in enumerate(pieces):
                chunk = piece[start : start + section]
                if r != own and chunk.numel():
                    slots[own][r * section : r * section + chunk.numel()].copy_(chunk)
            self._advance(head, first=start == 0)
            if start == 0:
                longest = self._agree_on_pieces()
            for r, into in enumerate(result):
                part = into[start : start + section]
                if r != own and part.numel():
                    part.copy_(slots[r][own * section : own * section + part.numel()])
            start += section
        result[own].copy_(pieces[own])
        return result

    def _agree_on_pieces(self) -> int:
        """The longest piece of an all-to-all; an error on all ranks if somebody expects another."""
        rows = [self.meeting.header_of(r) for r in range(self.size)]
        sent = [row[SHAPE : SHAPE + self.size] for row in rows]
        expected = [row[SHAPE + self.size : SHAPE + 2 * self.size] for row in rows]
        wrong = [
            f"group rank {r} expects {there[s]} elements of group rank {s}, which sends {here[r]}"
            for r, there in enumerate(expected)
            for s, here in enumerate(sent)
            if len(there) == self.size and there[s] != here[r]  # a header holds so many words
        ]
        if wrong:
            raise mark_announced(RankError("an all_to_all of pieces that do not fit", wrong))
        return max(row[NUM_BYTES] for row in rows)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The `x` of group rank `src`."""
        if not x.is_cpu:
            return self._other.broadcast(x, src)
        head = header("broadcast", x.dtype, x.shape, src=src)
        result = x.clone(memory_format=torch.contiguous_format)
        target = _flat_bytes(result)
        capacity = self.meeting.segment.slot_bytes
        for start in range(0, target.numel(), capacity) or (0,):
            slot = self._slots(torch.uint8)[src]
            part = target[start : start + capacity]
            if self.rank == src:
                slot[: part.numel()].copy_(part)
            self._advance(head, first=start == 0)
            if self.rank != src:
                part.copy_(slot[: part.numel()])
        return result

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's object."""
        mine = pickle.dumps(obj)
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        head = header("exchange", num_bytes=len(mine))
        capacity = self.meeting.segment.slot_bytes
        slots = self._slots(torch.uint8)
        chunk = message[:capacity]
        slots[self.rank][: chunk.numel()].copy_(chunk)
        self.meeting.meet(head)
        lengths = [self.meeting.header_of(r)[NUM_BYTES] for r in range(self.size)]
        received = [bytearray() for _ in lengths]
        for start in range(0, max(lengths), capacity):
            if start:
                slots = self._slots(torch.uint8)
                chunk = message[start : start + capacity]
                slots[self.rank][: chunk.numel()].copy_(chunk)
                self.meeting.step(head)
            for r, length in enumerate(lengths):
                received[r] += slots[r][: max(0, min(capacity, length - start))].numpy().tobytes()
        return [pickle.loads(message) for message in received]

    def raise_if_final(self) -> None:
        """Raise again what was raised when a rank died: no new link can be made without it."""
        dead = self.meeting.dead
        if dead is not None:
            again = RankError(dead.asked, dead.problems, dead.ways_out, dead.rank)
            raise mark_announced(again)

    def refuse(self, message: str) -> None:
        """Take part in the peers' next collective only to say that this rank cannot."""
        self.meeting.segment.write_message(self.rank, message)
        try:
            self.meeting.meet(header("refused"))
        except RankError:
            if self.spent:
                raise

    def announce_failure(self, message: str) -> bool:
        """Tell the ranks that wait, or will wait, for this one that it has failed."""
        self.meeting.announce(message)
        return True

    def set_timeout(self, seconds: float) -> None:
        """How long to wait for a rank that does not come."""
        self.meeting.timeout_s = seconds

    def close(self) -> None:
        """Let go of the shared memory; the link must not be used again."""
        self.meeting.close()
        self._plans.clear()
        self._flat.clear()

    def _advance(self, head: Header, *, first: bool) -> None:
        if first:
            self.meeting.meet(head)
        else:
            self.meeting.step(head)

    def _one_step_bytes(self) -> int:
        return min(ONE_STEP_BYTES, self.meeting.segment.slot_bytes)

    def _slots(self, dtype: torch.dtype) -> list[Tensor]:
        """The slots of the next step as flat tensors, by rank."""
        both = self._flat.get(dtype)
        if both is None:
            segment = self.meeting.segment
            both = self._flat[dtype] = (
                [segment.slot(0, r, dtype) for r in range(self.size)],
                [segment.slot(1, r, dtype) for r in range(self.size)],
            )
        return both[self.meeting.parity()]

    def _shaped(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        segment = self.meeting.segment
        with torch.inference_mode(False):
            halves = [
                [segment.slot(p, r, x.dtype)[: x.numel()].view(x.shape) for r in range(self.size)]
                for p in (0, 1)
            ]
        return halves[0], halves[1]


def _reduce(terms: Sequence[Tensor], op: Op, out: Tensor | None) -> Tensor:
    """Reduce in the order given, 16-bit sums in float32."""
    if op == "max":
        total = torch.maximum(terms[0], terms[1], out=out)
        for term in terms[2:]:
            torch.maximum(total, term, out=total)
        return total
    # The sum of two 16-bit floats is exact before it is rounded once, as in float32.
    if len(terms) == 2 or terms[0].dtype not in _SIXTEEN_BIT:
        total = torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            total.add_(term)
        return total
    wide = terms[0].float()
    for term in terms[1:]:
        wide.add_(term)
    return wide.to(terms[0].dtype) if out is None else out.copy_(wide)


def _even_chunks(num_elements: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """Start and length of chunks of about the same length."""
    length = ceil(num_elements / num_chunks)
    for start in range(0, num_elements, length):
        yield start, min(length, num_elements - start)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _flat_bytes(x: Tensor) -> Tensor:
    """The elements of `x` in order, as bytes; a view where `x` is contiguous."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
