"""Parts of comm that need no ranks: sizes, headers, counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.comm import Count, Tally, chunk_sizes
from plait.comm.link import headers, segment, waiting
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
    import os

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
    import os

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
