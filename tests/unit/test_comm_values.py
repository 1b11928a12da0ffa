"""Parts of comm that need no ranks: sizes, headers, counts."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.comm import Count, Tally, chunk_sizes
from plait.comm.announced import is_announced, mark_announced
from plait.comm.link import headers, segment, waiting
from plait.comm.link.meeting import Meeting
from plait.errors import RankError
from plait.testing import mutation


@given(st.integers(0, 200), st.integers(1, 17))
def test_sizes_are_those_of_torch_chunk_and_of_dtensor(extent, parts):
    chunks = [chunk.numel() for chunk in torch.empty(extent).chunk(parts)] if extent else []
    sizes = chunk_sizes(extent, parts)
    assert len(sizes) == parts
    assert sum(sizes) == extent
    assert [n for n in sizes if n] == chunks
    from torch.distributed.tensor import Shard

    assert list(sizes) == [
        Shard.local_shard_size_and_offset(extent, parts, r)[0] for r in range(parts)
    ]


def test_headers_tell_and_compare():
    a = headers.header("all_gather", torch.bfloat16, (2, 3), dim=1, num_bytes=12)
    b = headers.header("all_gather", torch.bfloat16, (2, 5), dim=1, num_bytes=20)
    assert a.signature == b.signature  # pieces may differ along the dimension they are joined in
    assert headers.describe(b.row) == "all_gather of bfloat16 (2, 5) along dim 1"
    others = [
        headers.header("all_gather", torch.bfloat16, (3, 3), dim=1),
        headers.header("all_gather", torch.float16, (2, 3), dim=1),
        headers.header("all_gather", torch.bfloat16, (2, 3), dim=0),
        headers.header("all_gather", torch.bfloat16, (2, 3), dim=1, sizes=(3, 3)),
        headers.header("reduce_scatter", torch.bfloat16, (2, 3), dim=1),
        headers.header("all_reduce", torch.bfloat16, (2, 3), op="sum"),
        headers.header("all_reduce", torch.bfloat16, (2, 3), op="max"),
        headers.header("all_reduce", torch.bfloat16, (2, 3, 1), op="max"),
        headers.header("broadcast", torch.bfloat16, (2, 3), src=0),
        headers.header("broadcast", torch.bfloat16, (2, 3), src=1),
    ]
    assert len({a.signature, *(other.signature for other in others)}) == 1 + len(others)
    assert "in sizes [3, 3]" in headers.describe(others[3].row)
    assert headers.describe(others[-1].row).endswith("(2, 3) from group rank 1")
    # A tensor of very many dimensions does not overrun the row.
    assert len(headers.header("all_reduce", torch.bool, (1,) * 64, op="max").row) <= 64


def test_every_dtype_has_a_code():
    known = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    missing = known - set(headers._DTYPES)
    assert {
        d
        for d in missing
        if not str(d).startswith(
            ("torch.q", "torch.int", "torch.uint", "torch.bits", "torch.float4", "torch.float8")
        )
    } == set()


def test_processes_that_live_and_die():
    born = waiting.birth(os.getpid())
    assert born
    child = os.fork()
    if child == 0:
        os._exit(0)
    for _ in range(1000):
        if waiting.birth(child) is None:  # ended, though nobody has collected it
            break
        waiting.pause(1)
    assert waiting.birth(child) is None
    os.waitpid(child, 0)
    assert waiting.birth(child) is None


def test_a_segment_holds_what_is_written():
    descriptor = segment.create(3)
    one, two = segment.Segment(descriptor, 3), segment.Segment(descriptor, 3)
    os.close(descriptor)
    row = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    one.write_header(2, 1, row)
    one.write_message(2, "ä" * 10_000)
    for rank in range(3):
        for parity in (0, 1):
            one.slot(parity, rank, torch.int32).fill_(rank + 10 * parity)
    assert two.read_header(2, 1)[: len(row)] == row
    assert two.read_message(2) == "ä" * (segment.MAX_MESSAGE // 2)
    for rank in range(3):
        for parity in (0, 1):
            assert two.slot(parity, rank, torch.int32).eq(rank + 10 * parity).all()
    assert two.read_header(2, 0) == [0] * segment.HEADER_WORDS
    with pytest.raises(AssertionError), mutation.patched(segment, "HEADER_WORDS", 63):
        assert two.read_header(2, 1)[: len(row)] == row


def two_meetings(processes=None, timeout_s=30.0):
    """Both ranks of a link, in one process."""
    descriptor = segment.create(2)
    me = (os.getpid(), waiting.birth(os.getpid()))
    both = [
        Meeting(segment.Segment(descriptor, 2), r, (0, 1), processes or [me, me], timeout_s)
        for r in range(2)
    ]
    os.close(descriptor)
    return both


def test_a_process_number_that_is_used_again_is_not_the_rank():
    pid, born = os.getpid(), waiting.birth(os.getpid())
    head = headers.header("broadcast", torch.bool, (1,))

    def check():
        here, _ = two_meetings([(pid, born), (pid, born - 1)], timeout_s=0.5)
        with pytest.raises(RankError, match="the process of rank 1 has ended") as info:
            here.meet(head)
        assert info.value.rank == 1
        assert here.dead is info.value

    check()
    # Mutation: any process of that number will do.
    with mutation.patched(Meeting, "_lives", lambda self, rank: bool(waiting.birth(pid))):
        with pytest.raises(AssertionError, match="it is alive"):
            check()


def arrived(meeting, head):
    """What a rank leaves behind that has written its part of a step and seen all the others."""
    meeting._step += 1
    base, parity = meeting.rank * segment.CONTROL_WORDS, meeting._step & 1
    meeting.segment.write_header(meeting.rank, parity, head.row)
    meeting.segment.words[base + segment.SIGNATURE + parity] = head.signature
    meeting.segment.words[base + segment.STEP] = meeting._step


def test_a_failure_after_a_step_leaves_the_step_alone():
    """A peer that leaves a collective and fails at once does not fail it for those still in it."""
    head = headers.header("broadcast", torch.bool, (1,))

    def check(first_step=None):
        here, peer = two_meetings()
        arrived(peer, head)
        peer.announce("no such index", first_step)
        peer.announce("again", first_step)
        here.meet(head)
        assert not here.spent
        with pytest.raises(RankError, match="rank 1: no such index"):
            here.meet(head)
        assert here.spent

    check()
    with pytest.raises(RankError):  # mutation: it ends the step that the peer has left
        check(1)
    # Unlike a failure, a difference between the ranks is about this step.
    here, peer = two_meetings()
    arrived(peer, headers.header("broadcast", torch.bool, (2,)))
    peer.announce("no such index")
    with pytest.raises(RankError, match="the ranks differ"):
        here.meet(head)


def test_errors_that_the_others_know():
    error = IndexError("7")
    assert not is_announced(error)
    assert mark_announced(error) is error
    assert is_announced(error)
    try:
        raise ValueError("8") from error
    except ValueError as later:
        assert is_announced(later)
    try:
        try:
            raise error
        except IndexError:
            raise ValueError("9")  # noqa: B904
    except ValueError as unrelated:
        assert not is_announced(unrelated)


def test_counts_compare_with_dicts():
    count = Count()
    assert count == {}
    count.record("all_reduce", 4096)
    count.record("all_reduce", 4096)
    count.record("all_gather", 10)
    assert count == {"all_reduce": 2, "all_gather": 1}
    assert count != {"all_reduce": 2}
    assert count.bytes == {"all_reduce": 8192, "all_gather": 10}
    assert count["broadcast"] == 0
    assert "broadcast" not in count
    assert count.forward == count
    assert not count.backward
    assert isinstance(count.forward, Tally)
    assert repr(count) == "{all_gather: 1 (10 B), all_reduce: 2 (8,192 B)}"
