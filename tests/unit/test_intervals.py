"""Index ranges: cuts equal to torch.chunk, packed sections, coverage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan.intervals import (
    ParamLayout,
    aligned,
    even,
    inside,
    joined,
    length,
    packed,
    taken,
    whole,
)

ranges = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ab: (min(ab), max(ab))), max_size=5
)


def indices(pieces):
    return [i for a, b in pieces for i in range(a, b)]


@given(st.integers(0, 30), st.integers(1, 9))
def test_even_cuts_as_torch_chunk(size, n):
    layout = even((3, size), -1, n)
    chunks = torch.arange(size).chunk(n) if size else ()
    expected = [chunk.tolist() for chunk in chunks]
    expected += [[]] * (n - len(expected))
    assert layout.dim == 1
    assert [indices(rank) for rank in layout.pieces] == expected
    assert layout.problems() == []


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_gives_each_rank_its_share_of_every_section(sections, n):
    size = sum(sections)
    layout = packed((size, 2), 0, n, sections)
    for rank in range(n):
        expected = []
        for part in torch.arange(size).split(sections):
            chunks = part.chunk(n) if len(part) else ()
            expected += chunks[rank].tolist() if rank < len(chunks) else []
        assert indices(layout.pieces[rank]) == expected
        assert layout.local_shape(rank) == (len(expected), 2)
    assert layout.problems() == []
    assert sum(layout.sizes) == size


@given(ranges, ranges, st.integers(0, 20), st.integers(0, 20))
def test_pieces_name_the_same_indices(outer, inner, a, b):
    assert indices(joined(outer)) == indices(outer)
    assert length(outer) == len(indices(outer))
    low, high = min(a, b), max(a, b)
    assert indices(inside(outer, low, high)) == [i - low for i in indices(outer) if low <= i < high]
    held = indices(outer)
    assert indices(taken(outer, inner)) == [held[i] for i in indices(inner) if i < len(held)]


def test_coverage_problems_name_ranks_and_ranges():
    gap = ParamLayout((8, 2), 0, (((0, 3),), ((4, 8),)))
    assert gap.problems() == ["no rank holds [3, 4) of dim 0"]
    twice = ParamLayout((8, 2), 0, (((0, 5),), ((4, 8),)))
    assert twice.problems() == ["[4, 5) of dim 0 is held twice, by rank 0 and rank 1"]
    assert ParamLayout((8, 2), 0, twice.pieces, shared=True).problems() == []
    outside = ParamLayout((8,), 0, (((0, 9),),))
    assert outside.problems() == ["rank 0 asks for [0, 9) of dim 0, which has 8"]
    short = ParamLayout((8,), -1, (((0, 4),), ()))
    assert short.problems() == ["no rank holds [4, 8) of dim 0"]


def test_whole_is_the_same_on_every_rank():
    layout = whole((4, 5))
    assert (layout.dim, layout.pieces, layout.num_ranks) == (None, (), None)
    assert layout.local_shape(7) == (4, 5)
    assert layout.pieces_of(7) == ()
    assert layout.local_numel(7) == layout.numel == 20
    assert even((4, 5), 0, 2).num_ranks == 2


def test_bad_cuts_are_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"add up to 5, but the dimension has 6"):
        packed((6,), 0, 2, (2, 3))
    with pytest.raises(PlanError, match="2 dimensions"):
        even((6, 2), 2, 2)
    with pytest.raises(PlanError, match="n must be"):
        even((6,), 0, 0)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    st.integers(1, 6),
    st.sampled_from([2, 4, 8]),
)
def test_stacks_of_experts_keep_rows_of_whole_16_bytes(sections, n, itemsize):
    size = sum(sections)
    layout = aligned((3, size, 5), 1, n, sections, itemsize)
    unit = 16 // itemsize
    ordinary = packed((3, size, 5), 1, n, sections)
    if layout is None:
        whole_rows = itemsize < 8 and all(s % unit == 0 and s >= n * unit for s in sections)
        assert not whole_rows or all(s % (n * unit) == 0 for s in sections)
        return
    assert layout.problems() == [] and layout != ordinary
    for pieces in layout.pieces:
        assert all(a % unit == 0 and b % unit == 0 for a, b in pieces)
    assert max(layout.sizes) - max(ordinary.sizes) < unit * len(sections)
    assert aligned((size, 5), 0, n, sections, itemsize) is None, "no stack"
