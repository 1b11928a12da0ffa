"""Masks as descriptions, the blocks made of them, and their kernels: those of dense attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.attention import (
    MaskSpec,
    Settings,
    Tokens,
    attend,
    kernels,
    places_of,
    segments_of,
    work,
    work_of,
)
from plait.attention.kernels import forward_block, merge_
from plait.attention.spans import joined
from plait.testing import mutation

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4], [0] * 4 + [1] * 11])
VALID = torch.ones(2, 15, dtype=torch.bool)
VALID[0, :4] = False
VALID[1, 12:] = False
HOLES = torch.arange(15).expand(2, -1) % 3 != 1
BLOCKS = torch.tensor([[-1] * 2 + [0] * 4 + [-1] * 3 + [1] * 5 + [-1], [-1] * 15])
SPECS = {
    "causal": MaskSpec(),
    "full": MaskSpec(causal=False),
    "window": MaskSpec(window=4),
    "wide window": MaskSpec(window=40),
    "both ways": MaskSpec(causal=False, window=2),
    "packed": MaskSpec(segments=DOCUMENTS),
    "packed both ways": MaskSpec(causal=False, segments=DOCUMENTS),
    "packed window": MaskSpec(window=3, segments=DOCUMENTS),
    "padded": MaskSpec(valid=VALID),
    "padded both ways": MaskSpec(causal=False, valid=VALID),
    "holes": MaskSpec(valid=HOLES),
    "blocks": MaskSpec(blocks=BLOCKS, window=3),
}


def dense(
    q: Any, k: Any, v: Any, seen: Any, scale: float, sinks: Any = None, cap: Any = None
) -> Any:
    """Attention by the book; 0 for queries that see nothing."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(-1e9)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    return (weights / total.clamp_min(1e-300)) @ v


def inputs(
    batch: int = 2, heads: tuple[int, int] = (4, 2), length: int = 15, dims: Any = (8, 8)
) -> Any:
    torch.manual_seed(0)
    sizes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    return [
        torch.randn(batch, n, length, d, dtype=torch.float64, requires_grad=True) for n, d in sizes
    ]


def compare(found: Any, wanted: Any, params: Any) -> None:
    assert (found - wanted).abs().max() < 1e-12
    weights = torch.randn_like(wanted)
    mine = torch.autograd.grad((found * weights).sum(), params)
    other = torch.autograd.grad((wanted * weights).sum(), params)
    for a, b in zip(mine, other, strict=True):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("dims", [(8, 8), (8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_dense_attention(name: str, dims: tuple[int, int]) -> None:
    spec, every = replace(SPECS[name], _rows={}), Tokens(((0, 15),))
    q, k, v = inputs(dims=dims)
    seen = spec.dense(torch.arange(15), torch.arange(15))
    found = attend(q, k, v, work_of(spec, every, every, 2), Settings(0.3))
    compare(found, dense(q, k, v, seen, 0.3), (q, k, v))


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("more", ["sinks", "softcap", "both"])
def test_sinks_and_softcaps(heads: tuple[int, int], more: str) -> None:
    spec, every = SPECS["packed window"], Tokens(((0, 15),))
    params = inputs(heads=heads)
    sinks = (
        torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
        if more != "softcap"
        else None
    )
    cap = None if more == "sinks" else 2.0
    seen = spec.dense(torch.arange(15), torch.arange(15))
    found = attend(*params, work_of(spec, every, every, 2), Settings(0.3, cap), sinks)
    params = params if sinks is None else [*params, sinks]
    compare(found, dense(*params[:3], seen, 0.3, sinks, cap), params)


def test_gradcheck() -> None:
    every = Tokens(((0, 7),))
    spec = MaskSpec(segments=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    q, k, v = inputs(1, (2, 1), 7, (4, 3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    found = work_of(spec, every, every, 1)
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x[:3], found, Settings(0.5), x[3]), (q, k, v, sinks)
    )


def test_bfloat16() -> None:
    q, k, v = inputs()
    every, spec = Tokens(((0, 15),)), SPECS["packed"]
    half = [x.bfloat16().detach().requires_grad_() for x in (q, k, v)]
    found = attend(*half, work_of(spec, every, every, 2), Settings(0.3))
    wanted = dense(*[x.double() for x in half], spec.dense(torch.arange(15), torch.arange(15)), 0.3)
    assert found.dtype == torch.bfloat16 and (found.double() - wanted).abs().max() < 0.03


@st.composite
def masks(draw: Any) -> tuple[MaskSpec, int]:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)

    def flags(chance: float) -> torch.Tensor:
        return torch.rand(batch, length, generator=generator) < chance

    segments = flags(draw(st.sampled_from([0.1, 0.5]))).cumsum(1) if draw(st.booleans()) else None
    valid = flags(0.8) if draw(st.booleans()) else None
    blocks = None
    if draw(st.booleans()):
        blocks = torch.where(flags(0.5), flags(0.2).cumsum(1), -1)
    window = draw(st.sampled_from([None, 1, 3, 100]))
    return MaskSpec(draw(st.booleans()), window, segments, valid, blocks), length


@given(masks(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 8), st.integers(0, 8))
def test_every_pair_is_in_one_block(
    found: tuple[MaskSpec, int], cp: int, sp: int, one: int, other: int
) -> None:
    spec, length = found
    batch = next((x.shape[0] for x in (spec.segments, spec.valid, spec.blocks) if x is not None), 2)
    places = places_of(length, cp, sp)
    q, k = places[one % len(places)], places[other % len(places)]
    seen = spec.dense(q.index(), k.index()).expand(batch, -1, -1)
    count = torch.zeros(batch, len(q), len(k), dtype=torch.int64)
    for job in work_of(spec, q, k, batch).jobs:
        rows = range(batch) if job.rows is None else job.rows
        here = torch.ones(job.q[1] - job.q[0], job.k[1] - job.k[0], dtype=torch.bool)
        here = here.tril() if job.kind == "causal" else here
        here = here if job.mask is None else job.mask[0]
        for row in rows:
            count[row, job.q[0] : job.q[1], job.k[0] : job.k[1]] += here
    assert torch.equal(count, seen.long())


def test_the_places_of_ranks_tile_the_sequence() -> None:
    for length in (0, 1, 2, 3, 7, 15, 30, 32):
        for cp, sp in ((1, 1), (2, 1), (1, 3), (2, 2), (3, 2)):
            places = places_of(length, cp, sp)
            assert sorted(torch.cat([held.index() for held in places]).tolist()) == list(
                range(length)
            )
            sizes = [len(joined(places[i * sp : (i + 1) * sp])) for i in range(cp)]
            assert max(sizes) - min(sizes) <= 2


def test_causal_work_is_the_same_for_all_places_of_a_ring() -> None:
    spec, places = MaskSpec(), places_of(1024, 4, 1)
    areas = [sum(work_of(spec, q, k, 1).area for k in places) for q in places]
    assert max(areas) == min(areas)


def test_packed_documents_cost_their_own_work() -> None:
    documents = torch.arange(4096)[None] // 512
    every = Tokens(((0, 4096),))
    packed = work_of(MaskSpec(segments=documents), every, every, 1).area
    assert packed == 8 * 512 * 513 // 2
    window = work_of(MaskSpec(window=256), every, every, 1).area
    assert window < 4096 * 256 * 1.6


def test_one_document_or_padded_token_changes_no_other() -> None:
    every = Tokens(((0, 15),))
    for name, changed in (("packed", slice(4, 9)), ("padded", slice(0, 4))):
        q, k, v = (x.detach() for x in inputs())
        found = work_of(SPECS[name], every, every, 2)
        before = attend(q, k, v, found, Settings(0.3))
        for x in (k, v):
            x[0, :, changed] += 1
        after = attend(q, k, v, found, Settings(0.3))
        same = torch.ones(15, dtype=torch.bool)
        same[changed] = False
        assert torch.equal(before[0][:, same], after[0][:, same])
        assert torch.equal(before[1], after[1])


@given(st.integers(0, 1000), st.integers(2, 5))
def test_parts_of_the_keys_join_in_any_order(seed: int, parts: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (x.detach() for x in inputs())
    spec, every = SPECS["padded"], Tokens(((0, 15),))
    whole = forward_block(q, k, v, work_of(spec, every, every, 2), Settings(0.3))
    out, lse = torch.zeros_like(whole[0]), torch.full_like(whole[1], -torch.inf)
    bounds = sorted(torch.randint(0, 16, (parts - 1,)).tolist())
    runs = list(zip([0, *bounds], [*bounds, 15], strict=True))
    for place in torch.randperm(len(runs)).tolist():
        start, stop = runs[place]
        some = Tokens(((start, stop),) if start < stop else ())
        found = work_of(spec, every, some, 2)
        merge_(
            out,
            lse,
            *forward_block(q, k[:, :, start:stop], v[:, :, start:stop], found, Settings(0.3)),
        )
    assert (out - whole[0]).abs().max() < 1e-13
    assert torch.equal(lse == -torch.inf, whole[1] == -torch.inf)


def test_segments_of_documents_and_chunks() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    chunks = torch.tensor([[0, 0, 1, 0, 0, 1]])
    assert segments_of(documents, chunks).tolist() == [[0, 0, 1, 2, 2, 3]]  # type: ignore[union-attr]
    assert segments_of(None, None) is None


def test_mutations_are_noticed() -> None:
    with mutation.must_fail(kernels, "_summed", lambda grad, group: grad[:, ::group]):
        test_blocks_are_dense_attention("causal", (8, 8))
    with mutation.must_fail(work, "_same", lambda runs, q, k: iter([(q, k)])):
        test_blocks_are_dense_attention("packed", (8, 8))
    with mutation.must_fail(work, "_triangle", lambda q, k: iter([(q, k, "full")])):
        test_blocks_are_dense_attention("causal", (8, 8))
