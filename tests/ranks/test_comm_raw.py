"""Collectives without autograd: values, shapes, dtypes, on the link and through torch."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait import comm
from plait.comm.group import group_of, transport_of
from plait.comm.link import collectives
from plait.testing import mutation

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
]


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def transport(name, mesh):
    return comm.through_torch(mesh) if name == "torch" else contextlib.nullcontext()


def term(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, shape, generator=generator).to(dtype)
    return x * (1 + 2j) if dtype.is_complex else x


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["link", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective(dtype, name, rank, world_size):
    mesh = one_axis(world_size)
    assert comm.is_linked(mesh)
    with transport(name, mesh):
        for shape in [(5, 6), (2, 3, 4), (0, 3)]:
            terms = [term(r, shape, dtype) for r in range(world_size)]
            total = torch.stack(terms).sum(0).to(dtype)
            x = terms[rank]
            kept = x.clone()
            assert torch.equal(comm.all_reduce(x, mesh), total)
            assert torch.equal(comm.broadcast(x, mesh, src=world_size - 1), terms[-1])
            for dim in (0, 1, -1):
                sizes = comm.chunk_sizes(x.shape[dim], world_size)
                piece = comm.reduce_scatter(x, mesh, dim)
                assert torch.equal(piece, total.split(sizes, dim)[rank])
                assert torch.equal(comm.all_gather(piece, mesh, dim), total)
                assert torch.equal(comm.all_gather(piece, mesh, dim, sizes), total)
            assert torch.equal(x, kept)  # nobody wrote to the caller's tensor
            assert torch.equal(comm.all_reduce_(x, mesh), total)
            assert torch.equal(x, total)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["link", "torch"])
def test_odd_layouts(name, rank, world_size):
    mesh = one_axis(world_size)
    with transport(name, mesh):
        x = term(rank, (6, 4), torch.float64)
        total = sum(term(r, (6, 4), torch.float64) for r in range(world_size))
        assert torch.equal(comm.all_reduce(x.t(), mesh), total.t())
        assert comm.all_reduce(x.t(), mesh).is_contiguous()
        assert torch.equal(comm.all_reduce(x[:, 1:3], mesh), total[:, 1:3])
        assert torch.equal(comm.all_reduce(x[0, 0].expand(3, 2), mesh), total[0, 0].expand(3, 2))
        assert torch.equal(comm.all_reduce(x[0, 0], mesh), total[0, 0])  # no dimensions
        transposed = x.clone().t()
        assert torch.equal(comm.all_reduce_(transposed, mesh), total.t())
        conjugate = torch.complex(x, x).conj()
        assert torch.equal(comm.all_reduce(conjugate, mesh), torch.complex(total, -total))
        assert torch.equal(comm.all_reduce_(conjugate, mesh), torch.complex(total, -total))
        biggest = torch.stack([term(r, (6, 4), torch.float64) for r in range(world_size)]).amax(0)
        assert torch.equal(comm.all_reduce(term(rank, (6, 4), torch.float64), mesh, "max"), biggest)
        flags = torch.arange(world_size) == rank
        assert comm.all_reduce(flags.int(), mesh, "max").all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["link", "torch"])
def test_unequal_and_empty_pieces(name, rank, world_size):
    mesh = one_axis(world_size)
    sizes = (3, 0, 2)
    whole = torch.arange(5 * 4.0).view(5, 4)
    with transport(name, mesh):
        for dim, x in ((0, whole), (1, whole.t()), (1, whole.t().contiguous())):
            piece = x.split(sizes, dim)[rank]
            assert torch.equal(comm.all_gather(piece, mesh, dim, sizes), x)
            assert torch.equal(comm.all_gather(piece, mesh, dim), x)
            assert torch.equal(comm.reduce_scatter(x, mesh, dim, sizes), piece * 3)


@pytest.mark.ranks(2, 3, 4)
def test_larger_than_a_slot(rank, world_size):
    mesh = one_axis(world_size)
    num = 1_000_003  # 4 MB and a bit: many chunks, the last one ragged

    x = torch.arange(num, dtype=torch.int32) % 1000 + rank
    total = (torch.arange(num, dtype=torch.int32) % 1000) * world_size
    total += sum(range(world_size))
    assert torch.equal(comm.all_reduce(x, mesh), total)
    assert torch.equal(comm.all_reduce_(x.clone(), mesh), total)
    sizes = (num - 11 * (world_size - 1), *[11] * (world_size - 1))
    for shape, dim in (((num,), 0), ((1, num), 1)):
        piece = comm.reduce_scatter(x.view(shape), mesh, dim, sizes)
        assert torch.equal(piece, total.view(shape).split(sizes, dim)[rank])
        assert torch.equal(comm.all_gather(piece, mesh, dim), total.view(shape))
    columns = comm.all_gather(x.view(-1, 1), mesh, 1)
    assert torch.equal(columns.sum(1), total)
    assert torch.equal(comm.broadcast(x, mesh), x - rank)
    message = [rank] * 800_000
    assert comm.exchange(message, mesh) == [[r] * 800_000 for r in range(world_size)]


@pytest.mark.ranks(2)
def test_sums_are_awaited(rank, world_size):
    """Mutation: without the second step's wait a rank reads sums that are not there yet."""
    mesh = one_axis(world_size)
    comm.exchange(0, mesh)
    real = collectives._reduce

    def slow(terms, op, out):
        time.sleep(0.05 * rank)
        return real(terms, op, out)

    def check(value):
        x = torch.full((100_000,), value)
        assert comm.all_reduce(x, mesh).eq(2 * value).all()

    with mutation.patched(collectives, "_reduce", slow):
        check(1.0)
        with mutation.must_fail(transport_of(group_of(mesh)).meeting, "step", lambda header: None):
            check(2.0)
        dist.barrier()
        check(3.0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=str)
@pytest.mark.parametrize("name", ["link", "torch"])
def test_two_groups(name, members, rank, world_size):
    grid = torch.tensor(members)
    both = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    mine = next(group for group in members if rank in group)
    mesh = both["tp"]
    with transport(name, mesh):
        x = torch.full((3,), float(rank))
        assert comm.all_reduce(x, mesh).tolist() == [sum(mine)] * 3
        assert comm.broadcast(x, mesh, src=1).tolist() == [mine[1]] * 3
        assert comm.all_gather(x[:1], mesh, 0).tolist() == list(mine)
        assert comm.exchange(rank, mesh) == list(mine)
        # The groups need not keep step with each other.
        for _ in range(1 + 20 * members.index(mine)):
            comm.all_reduce(x, mesh)
    across = both["dp"]
    assert comm.exchange(rank, across) == [g[mine.index(rank)] for g in members]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num", [7, 1024, 400_001])
def test_bit_equal_on_all_ranks_and_in_every_run(num, dtype, rank, world_size):
    mesh = one_axis(world_size)
    terms = [
        torch.randn(num, generator=torch.Generator().manual_seed(r)).mul(10.0 ** (r - 1)).to(dtype)
        for r in range(world_size)
    ]
    got = comm.all_reduce(terms[rank], mesh)
    wide = terms[0].float()
    for other in terms[1:]:
        wide = wide + other.float()
    assert torch.equal(got, wide.to(dtype))  # in rank order, rounded once
    every = [torch.empty_like(got.view(torch.uint8)) for _ in range(world_size)]
    dist.all_gather(every, got.view(torch.uint8))
    assert all(torch.equal(every[0], other) for other in every)
    with comm.through_torch(mesh):
        torch.testing.assert_close(comm.all_reduce(terms[rank], mesh), got)


@pytest.mark.ranks(2)
def test_inside_inference_mode_and_after(rank, world_size):
    mesh = one_axis(world_size)
    with torch.inference_mode():
        assert comm.all_reduce(torch.ones(17, 3), mesh).eq(2).all()
    x = torch.ones(17, 3, requires_grad=True)
    assert comm.all_reduce(x, mesh).eq(2).all()
    comm.sum_from(x * 2, mesh).sum().backward()
    assert x.grad.eq(2).all()


@pytest.mark.ranks(2)
def test_shapes_without_values(world_size):
    mesh = one_axis(world_size)
    with comm.count() as c:
        x = torch.empty(4, 3, device="meta")
        assert comm.all_reduce(x, mesh).shape == (4, 3)
        assert comm.all_gather(x, mesh, 1).shape == (4, 6)
        assert (
            comm.all_gather(x, mesh, 0, (4, 9) if dist.get_rank() == 0 else (9, 4)).shape[0] == 13
        )
        assert comm.reduce_scatter(x, mesh, 0).shape == (2, 3)
        assert comm.broadcast(x, mesh).is_meta
        with torch._subclasses.fake_tensor.FakeTensorMode():
            assert comm.all_reduce(torch.empty(5), mesh).shape == (5,)
    assert c == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1, "broadcast": 1}


@pytest.mark.ranks(2)
def test_one_rank_is_the_identity(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    x = torch.randn(3, 4)
    with comm.count() as c:
        for y in (
            comm.all_reduce(x, mesh),
            comm.all_gather(x, mesh, 0),
            comm.reduce_scatter(x, mesh, 1),
            comm.broadcast(x, mesh),
            comm.split_to(x, mesh, 0),
        ):
            assert y is x
        assert comm.exchange(rank, mesh) == [rank]
    assert c == {}


@pytest.mark.ranks(2)
def test_control_messages_are_not_counted(rank, world_size):
    mesh = one_axis(world_size)
    for name in ("link", "torch"):
        with transport(name, mesh), comm.count() as c:
            told = comm.exchange({"rank": rank, "text": "é" * rank}, mesh)
        assert told == [{"rank": r, "text": "é" * r} for r in range(world_size)]
        assert c == {}
