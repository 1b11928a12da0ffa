"""Attention over ranks that share sequences: Ulysses, the ring and both, as dense attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait import comm, mesh
from plait.attention import (
    MaskSpec,
    Settings,
    SharedSequences,
    attend_over_ranks,
    places_of,
    ring,
    ulysses,
)
from plait.layout import AXES, Layout
from plait.testing import mutation
from tests.unit.test_attention import SPECS, dense

LAYOUTS = {
    2: [{"sp": 2}, {"cp": 2}],
    3: [{"sp": 3}, {"cp": 3}],
    4: [{"sp": 4}, {"cp": 4}, {"cp": 2, "sp": 2}, {"dp_shard": 2, "sp": 2}, {"cp": 2, "tp": 2}],
}
HEADS = [(4, 4), (6, 3), (4, 2), (3, 1), (5, 5), (1, 1)]
LENGTHS = [15, 7, 30, 32, 1]


def axes_of(sizes: dict[str, int]) -> mesh.SequenceAxes:
    layout = Layout({axis: sizes.get(axis, 1) for axis in AXES})
    found = mesh.sequence_axes(layout, "cpu")
    assert found is not None
    return found


def spec_of(name: str, length: int, batch: int) -> MaskSpec:
    """One of the masks, for other lengths and batches."""
    spec = SPECS[name]

    def fit(x: Any) -> Any:
        if x is None:
            return None
        long = torch.cat([x, x + (x[:, -1:] + 1) if x.dtype == torch.int64 else x, x], 1)
        return long[:, :length].repeat(2, 1)[:batch]

    parts = {key: fit(getattr(spec, key)) for key in ("segments", "valid", "blocks")}
    if parts["segments"] is not None:
        parts["segments"] = (
            parts["segments"].diff(dim=1, prepend=parts["segments"][:, :1]) != 0
        ).cumsum(1)
    return replace(spec, _rows={}, **parts)


def check(
    sizes: dict[str, int],
    name: str,
    heads: tuple[int, int] = (4, 2),
    length: int = 15,
    batch: int = 2,
    *,
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
    softcap: float | None = None,
) -> None:
    axes, spec = axes_of(sizes), spec_of(name, length, batch)
    group = 0 if axes.samples is None else axes.samples.get_local_rank()
    torch.manual_seed(group)  # other groups see other data
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], 6)]
    whole = [torch.randn(batch, n, length, d, dtype=dtype, requires_grad=True) for n, d in shapes]
    params = [torch.randn(heads[0], dtype=dtype, requires_grad=True)] if sinks else []
    tokens = places_of(length, axes.cp_size, axes.sp_size)
    mine = tokens[axes.place].index()
    sequences = SharedSequences(axes, tokens, batch)
    qkv = tuple(x.detach()[:, :, mine].requires_grad_() for x in whole)
    own = [x.detach().clone().requires_grad_() for x in params]
    found = attend_over_ranks(qkv, spec, sequences, Settings(0.3, softcap), *own)
    seen = spec.dense(torch.arange(length), torch.arange(length)).expand(batch, -1, -1)
    wide = [x.double() for x in (*whole, *params)]
    wanted = dense(*wide[:3], seen, 0.3, *(wide[3:] or [None]), softcap)
    weights = torch.randn_like(wanted)
    limit = 1e-11 if dtype == torch.float64 else 0.05
    assert found.dtype == dtype
    assert _largest(found.double() - wanted[:, :, mine]) < limit
    (found * weights[:, :, mine].to(dtype)).sum().backward()
    grads = torch.autograd.grad((wanted * weights).sum(), (*whole, *params))
    for x, grad in zip(qkv, grads[:3], strict=True):
        assert _largest(x.grad.double() - grad[:, :, mine].double()) < limit * 4
    for x, grad in zip(own, grads[3:], strict=True):
        total = comm.all_reduce(x.grad.double(), axes.both)
        assert _largest(total - grad.double()) < limit * 40


def _largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", SPECS)
def test_masks(name: str, world_size: int) -> None:
    for sizes in LAYOUTS[world_size]:
        check(sizes, name)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads: tuple[int, int], world_size: int) -> None:
    for sizes in LAYOUTS[world_size]:
        check(sizes, "packed", heads, batch=1, sinks=True)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, world_size: int) -> None:
    for sizes in LAYOUTS[world_size]:
        for number, name in enumerate(("causal", "window", "padded both ways", "packed")):
            check(sizes, name, (6, 3), length, batch=1 + number % 3)


@pytest.mark.ranks(2, 4)
def test_softcaps_and_bfloat16(world_size: int) -> None:
    for sizes in LAYOUTS[world_size]:
        check(sizes, "packed window", softcap=2.0, sinks=True)
        check(sizes, "padded", dtype=torch.bfloat16)


@pytest.mark.ranks(2, 3, 4)
def test_the_ring_sends_no_block_that_nobody_needs(world_size: int) -> None:
    """The reach of blocks, and so the bytes, follow from the mask."""
    axes, length, heads, dim = axes_of({"cp": world_size}), 48, 2, 8
    q, k, v = (torch.randn(1, heads, length // world_size, dim) for _ in range(3))
    tokens = places_of(length, world_size, 1)
    element = heads * dim * 4 * 2  # keys and values of one token
    segments = torch.zeros(1, length, dtype=torch.int64)
    for start, stop in [run for held in tokens for run in held.runs]:
        segments[:, start:stop] = start  # documents that end where the stretches of ranks do
    for spec, shifts in ((MaskSpec(), world_size - 1), (MaskSpec(segments=segments), 0)):
        with comm.count() as counted:
            attend_over_ranks((q, k, v), spec, SharedSequences(axes, tokens, 1), Settings(1.0))
        assert counted["shift"] == shifts
        assert counted.bytes.get("shift", 0) == shifts * element * length // world_size


@pytest.mark.ranks(2, 4)
def test_ulysses_is_one_exchange_each_way(world_size: int) -> None:
    axes, length, dim = axes_of({"sp": world_size}), 16, 8
    heads = (8, 4)
    shapes = [heads[0], heads[1], heads[1]]
    tokens = places_of(length, 1, world_size)
    qkv = tuple(torch.randn(1, n, length // world_size, dim, requires_grad=True) for n in shapes)
    with comm.count() as counted:
        out = attend_over_ranks(qkv, MaskSpec(), SharedSequences(axes, tokens, 1), Settings(1.0))
        forward = counted["all_to_all"], counted.bytes["all_to_all"]
        out.sum().backward()
    away = (world_size - 1) / world_size
    elements = (2 * heads[0] + 2 * heads[1]) * dim * length / world_size * away
    assert forward == (2, 4 * elements)
    assert counted["all_to_all"] == 4 and counted.bytes["all_to_all"] == 8 * elements


@pytest.mark.ranks(2)
def test_mutations_are_noticed() -> None:
    with mutation.must_fail(ring, "merge_", lambda out, lse, a, b: (out.copy_(a), lse.copy_(b))):
        check({"cp": 2}, "causal")
    shares = ulysses.head_shares(6, 3, 2)
    wrong = replace(shares, kv=((0, 2), (0, 2)))
    with mutation.must_fail(ulysses, "head_shares", lambda *sizes: wrong):
        check({"sp": 2}, "causal", (6, 3))
    with mutation.must_fail(ring.Route, "num_hops", 1):
        check({"cp": 2}, "full")
    with mutation.must_fail(
        ring, "_bring_home", lambda home, route, mesh, like, dtype: [0 * x for x in like]
    ):
        check({"cp": 2}, "full")
