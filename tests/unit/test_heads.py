"""Which rank has which heads: for every number of heads and ranks."""

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.plan import heads as heads_room
from plait.plan.heads import HeadMap, head_map
from plait.testing import mutation


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, key/value heads, ranks."""
    num_kv_heads = draw(st.integers(1, 12))
    num_heads = num_kv_heads * draw(st.integers(1, 9))
    return num_heads, num_kv_heads, draw(st.integers(1, num_heads))


def problems(heads: HeadMap, num_heads: int, num_kv_heads: int, num_ranks: int) -> list[str]:
    """What is wrong with a map; written from the definition of grouped attention."""
    found = []
    group = num_heads // num_kv_heads
    if (heads.num_heads, heads.num_kv_heads, heads.num_ranks) != (
        num_heads,
        num_kv_heads,
        num_ranks,
    ):
        found.append("its counts are not those asked for")
    if [head for rank in heads.query for head in rank] != list(range(num_heads)):
        found.append("query heads are not on the ranks once each, in order")
    for query, kv in zip(heads.query, heads.kv, strict=True):
        if not query:
            found.append("a rank has no query head")
        if list(kv) != sorted({head // group for head in query}):
            found.append("a rank has not exactly the key/value heads that its query heads meet")
    return found


@given(counts())
def test_every_query_head_is_on_one_rank_with_its_key_value_head(
    counts: tuple[int, int, int],
) -> None:
    heads = head_map(*counts)
    assert not problems(heads, *counts)
    assert heads.group == counts[0] // counts[1]
    assert all(b - a == 1 for rank in heads.kv for a, b in itertools.pairwise(rank))
    used = [kv for rank in heads.kv for kv in rank]
    assert heads.is_shared is (len(used) != len(set(used)))


def test_the_definition_is_a_test() -> None:
    # A map that forgets the key/value head at the end of a rank.
    wrong = HeadMap(9, 3, ((0, 1, 2, 3, 4), (5, 6, 7, 8)), ((0,), (1, 2)))
    assert problems(wrong, 9, 3, 2) == [
        "a rank has not exactly the key/value heads that its query heads meet"
    ]
    assert problems(HeadMap(2, 2, ((0,), (0,)), ((0,), (0,))), 2, 2, 2)
    twice = HeadMap(9, 3, ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8)), ((0, 1), (1, 2)))
    with mutation.must_fail(heads_room, "_map", lambda *_: twice):
        assert not problems(head_map.__wrapped__(9, 3, 2), 9, 3, 2)


def busiest(query: list[int], num_heads: int, num_kv_heads: int) -> int:
    """Query and key/value heads of the rank that has most of both, by counting."""
    group, at, most = num_heads // num_kv_heads, 0, 0
    for size in query:
        most = max(most, size + len({head // group for head in range(at, at + size)}))
        at += size
    return most


@given(counts())
def test_ranks_differ_by_one_head_or_the_busiest_has_less_to_do(
    counts: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, num_ranks = counts
    heads = head_map(*counts)
    sizes = [len(rank) for rank in heads.query]
    work = busiest(sizes, num_heads, num_kv_heads)
    small, more = divmod(num_heads, num_ranks)
    straight = [small + (rank < more) for rank in range(num_ranks)]
    assert work <= busiest(straight, num_heads, num_kv_heads), "no worse than the simplest cut"
    if max(sizes) - min(sizes) > 1:
        assert not any(_inside(head, counts) for head in _borders(sizes)), "borders of kv heads"
        assert work < busiest(straight, num_heads, num_kv_heads)


def _borders(sizes: list[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(1, len(sizes))]


def _inside(border: int, counts: tuple[int, int, int]) -> bool:
    """Whether a border lies inside of a key/value head while there is one for every rank."""
    num_heads, num_kv_heads, num_ranks = counts
    return num_kv_heads >= num_ranks and border % (num_heads // num_kv_heads) != 0


@given(counts())
def test_level_stretches_are_the_best_of_all_arrangements(counts: tuple[int, int, int]) -> None:
    from itertools import combinations

    num_heads, num_kv_heads, num_ranks = counts
    small, more = divmod(num_heads, num_ranks)
    if num_ranks > 9:
        return
    sizes = heads_room._level_sizes(num_heads, num_heads // num_kv_heads, num_ranks)
    assert sorted(sizes) == sorted([small + 1] * more + [small] * (num_ranks - more))
    best = min(
        busiest([small + (rank in larger) for rank in range(num_ranks)], num_heads, num_kv_heads)
        for larger in combinations(range(num_ranks), more)
    )
    assert busiest(sizes, num_heads, num_kv_heads) == best


@given(counts())
def test_it_is_the_same_every_time_and_divides_where_it_can(counts: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, num_ranks = counts
    heads = head_map(*counts)
    head_map.cache_clear()
    again = head_map(*counts)
    assert again == heads and hash(again) == hash(heads)
    if num_kv_heads % num_ranks == 0:
        assert not heads.is_shared
        assert {len(rank) for rank in heads.query} == {num_heads // num_ranks}
        assert {len(rank) for rank in heads.kv} == {num_kv_heads // num_ranks}
    if num_ranks % num_kv_heads == 0 and num_heads % num_ranks == 0:
        assert {len(rank) for rank in heads.kv} == {1}


@given(counts())
def test_places_give_every_key_value_head_as_many_query_heads(
    counts: tuple[int, int, int],
) -> None:
    heads = head_map(*counts)
    for rank in range(heads.num_ranks):
        places, kv, size = heads.places(rank), heads.kv[rank], heads.local_group(rank)
        assert len(places) == len(kv) * size
        # Attention gives place p the local key/value head p // size.
        assert [kv[p // size] for p in range(len(places))] == [h // heads.group for h in places]
        assert tuple(sorted(set(places))) == heads.query[rank], "nothing lost, nothing foreign"
        assert list(places) == sorted(places)


@pytest.mark.parametrize(
    ("counts", "query", "kv"),
    [
        ((9, 3, 2), ((0, 1, 2, 3, 4), (5, 6, 7, 8)), ((0, 1), (1, 2))),
        ((9, 3, 3), ((0, 1, 2), (3, 4, 5), (6, 7, 8)), ((0,), (1,), (2,))),
        ((4, 1, 2), ((0, 1), (2, 3)), ((0,), (0,))),
        ((5, 1, 2), ((0, 1, 2), (3, 4)), ((0,), (0,))),
        ((7, 7, 3), ((0, 1, 2), (3, 4), (5, 6)), ((0, 1, 2), (3, 4), (5, 6))),
        ((8, 2, 4), ((0, 1), (2, 3), (4, 5), (6, 7)), ((0,), (0,), (1,), (1,))),
    ],
)
def test_maps_that_are_known(
    counts: tuple[int, int, int],
    query: tuple[tuple[int, ...], ...],
    kv: tuple[tuple[int, ...], ...],
) -> None:
    heads = head_map(*counts)
    assert (heads.query, heads.kv) == (query, kv)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((9, 3, 10), "10 ranks for 9 query heads"),
        ((4, 1, 5), "5 ranks for 4 query heads"),
        ((9, 2, 2), "9 query heads % 2 key/value heads ≠ 0"),
        ((2, 4, 2), "2 query heads % 4 key/value heads ≠ 0"),
        ((0, 1, 1), "every count is at least 1"),
        ((4, 0, 2), "every count is at least 1"),
        ((4, 2, 0), "every count is at least 1"),
        ((-4, -2, 2), "every count is at least 1"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(counts: tuple[int, int, int], says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        head_map(*counts)
    text = str(caught.value)
    assert says in text and "Ways out" in text and "replicate" in text


def test_it_prints_one_line_a_rank() -> None:
    assert str(head_map(4, 1, 3)).splitlines() == [
        "rank 0: query 0-1 · key/value 0",
        "rank 1: query 2 · key/value 0",
        "rank 2: query 3 · key/value 0",
    ]


def test_the_examples_in_its_docstrings() -> None:
    found = doctest.testmod(heads_room)
    assert found.attempted > 1 and not found.failed
