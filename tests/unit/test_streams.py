"""Shared and own streams of random numbers, without ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.run import seeds, streams


@given(number=st.integers(0, 2**63 - 1), ranks=st.sets(st.integers(0, 4095), min_size=2))
def test_ranks_part_and_meet_again(number: int, ranks: set[int]) -> None:
    own, after = set(), set()
    with seeds.borrowed():
        for rank in ranks:
            streams.follow_shared(number)
            assert streams.current() == streams.SHARED
            assert streams.begin_own(rank) and not streams.begin_own(rank)
            own.add(torch.default_generator.initial_seed() & 0xFFFFFFFF)
            torch.rand(rank % 7)  # each draws as many as it likes
            assert not streams.end_own(streams.HELD), "that of a block of code was not begun"
            assert streams.end_own()
            after.add(tuple(torch.rand(3).tolist()))
    assert len(own) == len(ranks), "two ranks have one stream"
    assert len(after) == 1, "the ranks do not meet again"


def test_a_state_that_is_restored_knows_its_stream() -> None:
    with seeds.borrowed(3):
        assert not streams.begin_own(1), "a user's own generator is left alone"
        before = torch.rand(2)
        streams.follow_shared(5)
        state = streams.saved()
        streams.begin_own(1)
        first = torch.rand(4)
        streams.restore(state)
        assert streams.current() == streams.SHARED
        streams.begin_own(1)
        assert torch.equal(first, torch.rand(4))
        streams.end_own()
        streams.begin_own(1)
        assert not torch.equal(first, torch.rand(4)), "the next region drops the same"
    with seeds.borrowed(3):
        assert torch.equal(before, torch.rand(2))
