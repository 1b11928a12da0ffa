"""Counting: plait's collectives and torch's, once each, by kind, bytes and phase."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait import comm
from plait.comm import torch_transport
from plait.testing import mutation


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


@pytest.mark.ranks(2, 3)
def test_own_collectives_on_both_transports(rank, world_size):
    mesh = one_axis(world_size)
    x = torch.ones(6, 4)

    def everything():
        with comm.count() as c:
            comm.all_reduce(x, mesh)
            comm.all_reduce(x.bfloat16(), mesh)
            comm.all_reduce_(x.clone(), mesh, "max")
            comm.all_gather(x, mesh, 0)
            comm.reduce_scatter(x, mesh, 0)
            comm.broadcast(x, mesh)
        return c

    kinds = {"all_reduce": 3, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
    num_bytes = {
        "all_reduce": 96 * 2 + 48,
        "all_gather": 96 * world_size,
        "reduce_scatter": 96,
        "broadcast": 96,
    }
    comm.exchange(0, mesh)
    linked = everything()
    with comm.through_torch(mesh):
        through_torch = everything()
        # Mutation: torch's own calls of the same collectives are seen a second time.
        with mutation.must_fail(torch_transport, "unseen", contextlib.nullcontext):
            assert everything() == kinds
    for c in (linked, through_torch):
        assert c == kinds
        assert c.forward == kinds
        assert c.backward == {}
        assert c.bytes == num_bytes
        assert c.forward.bytes == num_bytes
        assert c["all_to_all"] == 0


@pytest.mark.ranks(2)
def test_torch_collectives(rank, world_size):
    mesh = one_axis(world_size)
    with comm.count() as c:
        d = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
        assert d.redistribute(mesh, [Replicate()]).to_local().shape == (8, 4)
        assert d.full_tensor().shape == (8, 4)
        p = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        assert p.redistribute(mesh, [Replicate()]).to_local().eq(2).all()
        assert p.redistribute(mesh, [Shard(1)]).to_local().shape == (4, 2)
    assert c == {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 1}
    assert c.bytes == {"all_gather": 2 * 128, "all_reduce": 64, "reduce_scatter": 64}
    group = mesh.get_group()
    with comm.count() as c:
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(4) for _ in range(2)], x)
        dist.all_gather_single(torch.empty(8), x)
        dist.reduce_scatter_single(torch.empty(2), x)
        dist.reduce(x, 0)
        functional.all_reduce(x, "sum", group).wait()
        functional.all_gather_tensor(x, 0, group).wait()
        functional.reduce_scatter_tensor(x, "sum", 0, group).wait()
        dist.all_to_all_single(torch.empty(4), x)
        functional.all_to_all_single(x, None, None, group).wait()
    assert c == {
        "all_reduce": 2,
        "broadcast": 1,
        "all_gather": 3,
        "reduce_scatter": 2,
        "reduce": 1,
        "all_to_all": 2,
    }
    assert c.bytes == {
        "all_reduce": 32,
        "broadcast": 16,
        "all_gather": 96,
        "reduce_scatter": 32,
        "reduce": 16,
        "all_to_all": 32,
    }


@pytest.mark.ranks(2)
def test_phases(rank, world_size):
    mesh = one_axis(world_size)
    with comm.count() as c:
        x = torch.ones(4, 4, requires_grad=True)
        y = comm.sum_from(comm.copy_to(x * 2, mesh) * 3, mesh)
        d = DTensor.from_local(y, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        (d.to_local() * 2).sum().backward()
    assert c.forward == {"all_reduce": 1, "all_gather": 1}
    assert c.backward["all_reduce"] == 1
    assert c["all_reduce"] == 2


@pytest.mark.ranks(2)
def test_nested_counts_and_errors(rank, world_size):
    mesh = one_axis(world_size)
    x = torch.ones(4)
    with comm.count() as outer:
        comm.all_reduce(x, mesh)
        with comm.count() as inner:
            comm.all_reduce(x, mesh)
            dist.all_reduce(x)
        with pytest.raises(ZeroDivisionError), comm.count():
            1 / 0  # noqa: B018
    assert inner == {"all_reduce": 2}
    assert outer == {"all_reduce": 3}
    comm.all_reduce(x, mesh)
    assert outer == {"all_reduce": 3}
    assert repr(inner) == "{all_reduce: 2 (32 B)}"
