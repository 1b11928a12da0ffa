"""Dealing out the parts of tensors: every element once, whatever overlaps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint.boxes import Box, Whole, shares, volume, without
from plait.errors import CheckpointError

SHAPE = (5, 4, 3)


def boxes() -> st.SearchStrategy[Box]:
    """Boxes inside of SHAPE, none empty."""

    def sized(starts: tuple[int, ...]) -> st.SearchStrategy[Box]:
        ends = (st.integers(1, n - a) for a, n in zip(starts, SHAPE, strict=True))
        return st.tuples(st.just(starts), st.tuples(*ends))

    return st.tuples(*(st.integers(0, n - 1) for n in SHAPE)).flatmap(sized)


def marked(found: list[Box]) -> torch.Tensor:
    """How often each element is in one of some boxes."""
    marks = torch.zeros(SHAPE, dtype=torch.int64)
    for starts, sizes in found:
        marks[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
    return marks


@given(boxes(), boxes())
def test_what_is_left_of_a_box(box: Box, taken: Box) -> None:
    left = without(box, taken)
    assert torch.equal(marked(left), marked([box]) * (1 - marked([taken])))
    assert len(left) <= 2 * len(SHAPE) and all(volume(part) > 0 for part in left)


@given(st.lists(st.lists(boxes(), max_size=3), min_size=1, max_size=4))
def test_every_element_is_given_to_one_rank_that_holds_it(held: list[list[Box]]) -> None:
    everything: Box = ((0, 0, 0), SHAPE)
    ranks = [*held, [everything]]  # somebody holds all of it
    given_out = shares("", {"k": Whole("x", SHAPE, 4)}, [{"x": found} for found in ranks])
    assert (marked([box for share in given_out for box in share.get("k", [])]) == 1).all()
    for share, found in zip(given_out, ranks, strict=True):
        assert (marked(share.get("k", [])) <= marked(found)).all()


def test_copies_are_spread_evenly() -> None:
    tensors = {f"k{i}": Whole(f"x{i}", (1 + i % 7, 3), 4) for i in range(40)}
    held = {x.name: [((0, 0), x.shape)] for x in tensors.values()}
    given_out = shares("", tensors, [held] * 4)
    load = [sum(volume(b) for found in share.values() for b in found) for share in given_out]
    assert sum(load) == sum(math.prod(x.shape) for x in tensors.values())
    assert max(load) - min(load) <= 7 * 3


def test_a_part_on_no_rank_is_named() -> None:
    with pytest.raises(CheckpointError, match="x: 6 elements are on no rank"):
        shares("Save.", {"k": Whole("x", (4, 3), 4)}, [{"x": [((0, 0), (2, 3))]}])


def test_scalars_and_empty_tensors() -> None:
    tensors = {"a": Whole("a", (), 4), "b": Whole("b", (0, 3), 4)}
    assert shares("", tensors, [{"a": [((), ())], "b": []}]) == [{"a": [((), ())]}]
