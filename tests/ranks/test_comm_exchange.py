"""Exchanges of uneven pieces, and blocks that travel around a ring."""

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plait import comm
from plait.comm import exchanges
from plait.errors import RankError
from plait.testing import mutation


def axis_of(world_size: int, groups: int = 1) -> Any:
    if groups == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("sp",))
    mesh = init_device_mesh("cpu", (groups, world_size // groups), mesh_dim_names=("dp", "sp"))
    return mesh["sp"]


def numel(sender: int, receiver: int) -> int:
    return (3 * sender + 2 * receiver) % 5  # some are empty


def piece(sender: int, receiver: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    size = numel(sender, receiver)
    return (torch.arange(size) + 100 * sender + 10 * receiver + 1000 * group).to(dtype)


def check(mesh: Any, group: int, dtype: torch.dtype) -> None:
    rank, size = mesh.get_local_rank(), mesh.size()
    sent = [piece(rank, other, group, dtype) for other in range(size)]
    sent = [x.requires_grad_(dtype.is_floating_point) for x in sent]
    shapes = [(numel(other, rank),) for other in range(size)]
    with comm.count() as counted:
        found = comm.exchange_pieces(sent, mesh, shapes)
    for other, x in enumerate(found):
        assert torch.equal(x, piece(other, rank, group, dtype))
    away = sum(x.numel() for other, x in enumerate(sent) if other != rank)
    assert counted["all_to_all"] == 1
    assert counted.bytes["all_to_all"] == away * sent[0].element_size()
    if dtype.is_floating_point:
        sum((x * (other + 1)).sum() for other, x in enumerate(found)).backward()
        for other, x in enumerate(sent):  # what the receiver multiplied it with
            assert torch.equal(x.grad, torch.full_like(x, rank + 1)), other


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("linked", [True, False])
def test_pieces_reach_their_ranks(dtype: torch.dtype, linked: bool, world_size: int) -> None:
    axes = [(axis_of(world_size), 0)]
    if world_size == 4:
        axes.append((axis_of(4, groups=2), dist.get_rank() // 2))
    for mesh, group in axes:
        with contextlib.nullcontext() if linked else comm.through_torch(mesh):
            check(mesh, group, dtype)


@pytest.mark.ranks(2, 3)
def test_pieces_longer_than_a_slot(world_size: int) -> None:
    mesh = axis_of(world_size)
    rank, long = mesh.get_local_rank(), 5_000_000
    sent = [
        torch.full((long + other,), float(rank), dtype=torch.float64) for other in range(world_size)
    ]
    found = comm.all_to_all(sent, mesh, [(long + rank,)] * world_size)
    for other, x in enumerate(found):
        assert x.numel() == long + rank and bool((x == other).all())


@pytest.mark.ranks(2, 3)
def test_what_does_not_fit_is_an_error_on_all_ranks(world_size: int) -> None:
    mesh, begin = axis_of(world_size), time.monotonic()
    rank = mesh.get_local_rank()
    sent = [torch.zeros(2) for _ in range(world_size)]
    wanted = [(2,)] * world_size
    if rank == 0:
        wanted[1] = (3,)  # of rank 1, which sends 2
    with pytest.raises(RankError, match="expects 3 elements of group rank 1, which sends 2"):
        comm.all_to_all(sent, mesh, wanted)
    with pytest.raises(RankError, match=f"1 pieces for {world_size} ranks"):
        comm.all_to_all(sent[:1], mesh, [(2,)])
    with pytest.raises(RankError, match="several dtypes"):
        comm.all_to_all([torch.zeros(1).double(), *sent[1:]], mesh, [(1,), *wanted[1:]])
    found = comm.all_to_all(sent, mesh, [(2,)] * world_size)  # the axis is as it was
    assert len(found) == world_size and time.monotonic() - begin < 5


@pytest.mark.ranks(2, 3, 4)
def test_a_ring_goes_on_before_its_message_has_come(world_size: int) -> None:
    for mesh in (axis_of(world_size), *([axis_of(4, groups=2)] if world_size == 4 else [])):
        ring, rank, size = comm.Ring(mesh), mesh.get_local_rank(), mesh.size()
        before = (rank - 1) % size
        sent = [torch.full((2, rank + 1), float(rank)), torch.full((3,), rank + 0.5)]
        pending = ring.start(
            sent, [(2, before + 1), (3,)], dtype=torch.float32, device=torch.device("cpu")
        )
        dist.barrier()  # everybody has started, and nobody has waited
        found = pending.wait()
        assert torch.equal(found[0], torch.full((2, before + 1), float(before)))
        assert torch.equal(found[1], torch.full((3,), before + 0.5))
        empty = ring.start(None, None, dtype=torch.float32, device=torch.device("cpu"))
        assert empty.wait() == []


@pytest.mark.ranks(2)
def test_mutations_are_noticed(world_size: int) -> None:
    mesh = axis_of(world_size)
    swapped = lambda pieces, mesh, shapes: [x.flip(0) for x in pieces]  # noqa: E731
    with mutation.must_fail(exchanges, "all_to_all", swapped):
        check(mesh, 0, torch.float64)
