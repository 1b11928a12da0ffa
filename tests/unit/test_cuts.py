"""Dimensions made of heads: what a rank needs, stores and sees, by single features."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.plan import cuts
from plait.plan.cuts import Cut, Run, cut, one_kind, per_group, sections
from plait.plan.heads import HeadMap, head_map
from plait.plan.intervals import Pieces, taken
from plait.styles import heads as styles_heads
from plait.styles.heads import RankCut, rearranged
from plait.testing import mutation

LAYOUTS = ("q", "kv", "sections", "per_group", "kv_sections", "kv_per_head")


Case = tuple[int, int, int, int, int, str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Query and key/value heads, ranks, widths of a q or k and of a v head, the layout's name."""
    num_kv_heads = draw(st.integers(1, 6))
    num_heads = num_kv_heads * draw(st.integers(1, 5))
    num_ranks = draw(st.integers(1, min(num_heads, 6)))
    qk, v = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return num_heads, num_kv_heads, num_ranks, qk, v, draw(st.sampled_from(LAYOUTS))


def made(case: Case) -> tuple[HeadMap, Cut, list[tuple[str, int, int]]]:
    """The head map, the cut of the dimension, and what every feature of the dimension is."""
    num_heads, num_kv_heads, num_ranks, qk, v, layout = case
    heads = head_map(num_heads, num_kv_heads, num_ranks)
    return heads, cut(runs_of(case), heads), features(layout, heads, qk, v)


def runs_of(case: Case) -> tuple[Run, ...]:
    num_heads, num_kv_heads, num_ranks, qk, v, layout = case
    heads = head_map(num_heads, num_kv_heads, num_ranks)
    return {
        "q": one_kind("q", num_heads, qk),
        "kv": one_kind("kv", num_kv_heads, qk),
        "sections": sections(heads, qk, v),
        "per_group": per_group(heads, qk, v),
        "kv_sections": one_kind("kv", num_kv_heads, qk) + one_kind("kv", num_kv_heads, v),
        "kv_per_head": one_kind("kv", num_kv_heads, qk + v),
    }[layout]


def indices(pieces: Pieces) -> list[int]:
    return [i for a, b in pieces for i in range(a, b)]


def features(layout: str, heads: HeadMap, qk: int, v: int) -> list[tuple[str, int, int]]:
    """Every feature of the whole dimension: (q, k or v; head; number in the head)."""
    q = [("q", h, i) for h in range(heads.num_heads) for i in range(qk)]
    k = [("k", h, i) for h in range(heads.num_kv_heads) for i in range(qk)]
    values = [("v", h, i) for h in range(heads.num_kv_heads) for i in range(v)]
    if layout in ("q", "kv"):
        return q if layout == "q" else k
    if layout == "sections":
        return q + k + values
    if layout == "kv_sections":
        return k + values
    found: list[tuple[str, int, int]] = []
    for kv in range(heads.num_kv_heads):
        if layout == "per_group":
            found += [f for f in q if f[1] // heads.group == kv]
        found += [f for f in k if f[1] == kv] + [f for f in values if f[1] == kv]
    return found


def seen_by(case: Case, rank: int) -> list[tuple[str, int, int]]:
    """What the attention of a rank has to see: the same layout, of its places and kv heads."""
    heads, (*_, qk, v, layout) = head_map(*case[:3]), case
    places, kv = heads.places(rank), heads.kv[rank]
    local = HeadMap(len(places), len(kv), (), ())
    wanted = features(layout, local, qk, v)
    return [(kind, (places if kind == "q" else kv)[head], i) for kind, head, i in wanted]


@given(cases())
def test_what_all_ranks_store_is_the_dimension_once(case: Case) -> None:
    _, found, _ = made(case)
    stored = sorted(i for pieces in found.owned for i in indices(pieces))
    assert stored == list(range(found.size))
    assert found.layout((3, found.size), 1).problems() == []
    for need, owned in zip(found.need, found.owned, strict=True):
        mine = indices(need)
        assert len(mine) == len(set(mine)), "needed once"
        own = indices(owned)
        assert set(own) <= set(mine), "a rank stores nothing that it does not use"
        assert own == [i for i in mine if i in set(own)], "in the order of its local tensor"


@given(cases())
def test_a_rank_needs_the_features_of_its_heads_in_the_layout_of_the_whole(case: Case) -> None:
    heads, found, whole = made(case)
    assert found.size == len(whole)
    for rank in range(heads.num_ranks):
        mine = [whole[i] for i in indices(found.need[rank])]
        expected = [f for f in whole if f[1] in (heads.query if f[0] == "q" else heads.kv)[rank]]
        assert mine == expected


@given(cases())
def test_the_attention_sees_the_same_layout_with_local_counts(case: Case) -> None:
    heads, found, whole = made(case)
    for rank in range(heads.num_ranks):
        need, places = found.need[rank], found.places[rank]
        seen = need if places is None else taken(need, places)
        assert [whole[i] for i in indices(seen)] == seen_by(case, rank)


@given(cases())
def test_what_is_real_undoes_what_is_repeated(case: Case) -> None:
    _, found, _ = made(case)
    assert found.is_padded is any(p is not None for p in found.places)
    for need, places, real in zip(found.need, found.places, found.real, strict=True):
        assert (places is None) is (real is None)
        if places is None or real is None:
            continue
        x = torch.arange(len(indices(need)))
        seen = rearranged(x, 0, places)
        assert len(seen) > len(x)
        assert torch.equal(rearranged(seen, 0, real), x)


@given(cases())
def test_a_stretch_that_several_ranks_need_is_divided_evenly(case: Case) -> None:
    heads, found, _ = made(case)
    assert found.is_shared is (found.need != found.owned)
    position = 0
    for run in runs_of(case):
        if run.kind == "kv":
            users = [r for r in range(heads.num_ranks) if run.head in heads.kv[r]]
            inside = range(position, position + run.size)
            shares = [len(set(indices(found.owned[r])) & set(inside)) for r in users]
            assert sum(shares) == run.size
            # Neighbouring runs of the same ranks are divided together.
            if len(users) == 1:
                assert shares == [run.size]
        position += run.size


class _Mesh:
    """As much of a mesh as a RankCut asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self._size


def rank_cuts(found: Cut) -> list[RankCut]:
    n = len(found.need)
    make: Any = getattr(RankCut.__init__, "__wrapped__", RankCut.__init__)
    result = []
    for rank in range(n):
        one = RankCut.__new__(RankCut)
        make(one, found, _Mesh(rank, n))
        result.append(one)
    return result


def needed_by_all(found: Cut, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """`RankCut.needed` of every rank, the collective replaced by a concatenation."""
    ranks = rank_cuts(found)
    owned = [rearranged(x, dim, p) if p else x.narrow(dim, 0, 0) for p in found.owned]
    handed: list[torch.Tensor] = []

    def hand_in(part: torch.Tensor, mesh: Any, dim: int, sizes: Any) -> torch.Tensor:
        assert part.shape[dim] == sizes[mesh.rank]
        handed.append(part)
        return part.new_empty([*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]])

    with mutation.patched(styles_heads, "gather_copy", hand_in):
        for one, part in zip(ranks, owned, strict=True):
            one.needed(part.clone(), dim)
    if not handed:
        return owned
    whole = torch.cat(handed, dim=dim)
    with mutation.patched(styles_heads, "gather_copy", lambda *_: whole):
        return [one.needed(part, dim) for one, part in zip(rank_cuts(found), owned, strict=True)]


@given(cases(), st.sampled_from([0, 1]))
def test_needed_features_are_put_together_from_what_the_ranks_store(case: Case, dim: int) -> None:
    _, found, _ = made(case)
    x = torch.arange(found.size * 2).view(found.size, 2)
    x = x if dim == 0 else x.t().contiguous()
    for need, mine in zip(found.need, needed_by_all(found, x, dim), strict=True):
        assert torch.equal(mine, x.index_select(dim, torch.tensor(indices(need))))


@given(cases())
def test_a_sum_over_all_ranks_counts_every_feature_once(case: Case) -> None:
    _, found, _ = made(case)
    counted: list[int] = []
    for rank, one in enumerate(rank_cuts(found)):
        places = found.places[rank]
        need = found.need[rank]
        seen = indices(need if places is None else taken(need, places))
        assert one.seen_size == len(seen)
        ranges = one.counted
        counted += seen if ranges is None else [seen[i] for i in indices(ranges)]
    assert sorted(counted) == list(range(found.size))


def test_these_tests_notice_a_run_that_is_stored_twice() -> None:
    heads = head_map(9, 3, 2)

    def every_need(size: int, need: Any) -> Any:
        return tuple(need)

    with mutation.must_fail(cuts, "_owned", every_need):
        found = cut(one_kind("kv", 3, 2), heads)
        stored = sorted(i for pieces in found.owned for i in indices(pieces))
        assert stored == list(range(found.size))
    with mutation.must_fail(cuts, "_places", lambda *_: (None, None)):
        found = cut(one_kind("q", 9, 1), heads)
        assert list(indices(found.places[0] or found.need[0])) == list(heads.places(0))


def test_an_ordinary_shard_is_known_as_one() -> None:
    even = cut(one_kind("q", 8, 2), head_map(8, 4, 2))
    assert even.is_even and not even.is_shared and not even.is_padded
    odd = cut(one_kind("q", 9, 2), head_map(9, 3, 2))
    assert odd.is_padded and not odd.is_shared
    fused = cut(sections(head_map(8, 4, 2), 2, 2), head_map(8, 4, 2))
    assert not fused.is_even and len(fused.need[0]) == 3
