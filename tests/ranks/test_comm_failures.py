"""What goes wrong between ranks is an error on all of them, soon, that names the culprit."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plait import comm
from plait.comm import control
from plait.comm.group import group_of, transport_of
from plait.errors import RankError
from plait.testing import mutation, run_ranks


def one_axis(world_size=None):
    size = dist.get_world_size() if world_size is None else world_size
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def raised(action, within_s=5.0):
    """The RankError of `action`, which must come in time."""
    start = time.monotonic()
    with pytest.raises(RankError) as info:
        action()
    assert time.monotonic() - start < within_s
    return info.value


def fail():
    raise IndexError("index 7 is out of range")


MISMATCHES = {
    "shape": (
        lambda mesh, odd: comm.all_reduce(torch.ones(3, 5 if odd else 4), mesh),
        ("all_reduce of float32 (3, 5)", "all_reduce of float32 (3, 4)"),
    ),
    "number of dimensions": (
        lambda mesh, odd: comm.all_reduce(torch.ones((12,) if odd else (3, 4)), mesh),
        ("float32 (12,)", "float32 (3, 4)"),
    ),
    "large shape": (
        lambda mesh, odd: comm.all_reduce(torch.ones(10**6 + odd), mesh),
        ("(1000001,)", "(1000000,)"),
    ),
    "dtype": (
        lambda mesh, odd: comm.all_reduce(torch.ones(3).to(torch.int32 if odd else None), mesh),
        ("int32 (3,)", "float32 (3,)"),
    ),
    "operation": (
        lambda mesh, odd: comm.all_reduce(torch.ones(3), mesh, "max" if odd else "sum"),
        ("(max)", "(sum)"),
    ),
    "kind": (
        lambda mesh, odd: (comm.broadcast if odd else comm.all_reduce)(torch.ones(3), mesh),
        ("broadcast of float32 (3,) from group rank 0", "all_reduce of float32 (3,) (sum)"),
    ),
    "message": (
        lambda mesh, odd: (
            comm.exchange("hello", mesh) if odd else comm.all_gather(torch.ones(3), mesh, 0)
        ),
        ("exchange of a control message", "all_gather of float32 (3,) along dim 0"),
    ),
    "other dims of a gather": (
        lambda mesh, odd: comm.all_gather(torch.ones(3, 5 if odd else 4), mesh, 0),
        ("(3, 5) along dim 0", "(3, 4) along dim 0"),
    ),
    "dim": (
        lambda mesh, odd: comm.reduce_scatter(torch.ones(4, 4), mesh, int(odd)),
        ("along dim 1", "along dim 0"),
    ),
    "source": (
        lambda mesh, odd: comm.broadcast(torch.ones(4), mesh, int(odd)),
        ("from group rank 1", "from group rank 0"),
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", sorted(MISMATCHES))
def test_mismatch(what, rank, world_size):
    mesh = one_axis()
    comm.exchange(0, mesh)
    action, (wish_of_last, wish_of_others) = MISMATCHES[what]
    for _ in range(2):  # the link survives, in both halves of its slots
        error = raised(lambda: action(mesh, rank == world_size - 1))
        text = str(error)
        assert f"rank {world_size - 1}: " in text
        assert wish_of_last in text
        assert wish_of_others in text
        assert "rank 0: " in text
        if world_size > 2:
            assert error.rank == world_size - 1
        assert comm.all_reduce(torch.ones(2), mesh).eq(world_size).all()


@pytest.mark.ranks(2)
def test_mismatch_needs_the_comparison(rank):
    """Mutation: with equal signatures for everything, nobody notices that the shapes differ."""
    from plait.comm.link import collectives, headers

    mesh = one_axis()
    comm.exchange(0, mesh)
    real = headers.header

    def blind(*args, **kwargs):
        return headers.Header(real(*args, **kwargs).row, 17)

    with mutation.must_fail(
        collectives, "header", blind, raises=(AssertionError, pytest.fail.Exception)
    ):
        raised(lambda: comm.broadcast(torch.ones(6).view((2, 3) if rank else (3, 2)), mesh))


WRONG = {
    "dim": (lambda mesh: comm.all_gather(torch.ones(3), mesh, 1), "dimensions, not 1"),
    "number of sizes": (lambda mesh: comm.all_gather(torch.ones(3), mesh, 0, [3]), "1 sizes [3]"),
    "own size": (
        lambda mesh: comm.all_gather(torch.ones(3), mesh, 0, [2] * mesh.size()),
        "should hold 2",
    ),
    "sum of sizes": (
        lambda mesh: comm.reduce_scatter(torch.ones(9), mesh, 0, [1] * mesh.size()),
        "add up to",
    ),
    "source": (lambda mesh: comm.broadcast(torch.ones(3), mesh, 7), "group rank 7"),
    "DTensor": (
        lambda mesh: comm.all_reduce(torch.distributed.tensor.ones(4, device_mesh=mesh), mesh),
        "DTensor",
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", sorted(set(WRONG) - {"DTensor"}))
def test_arguments_wrong_on_one_rank(what, rank, world_size):
    """The rank says what is wrong; the others, which wait for it, hear it too."""
    mesh = one_axis()
    action, part = WRONG[what]
    if rank == 1:
        error = raised(lambda: action(mesh))
    else:
        error = raised(lambda: comm.all_reduce(torch.ones(3), mesh))
        assert "rank 1: " in str(error)
    assert part in str(error)
    assert comm.exchange(rank, mesh) == list(range(world_size))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_arguments_wrong_on_all_ranks(what, rank, world_size):
    mesh = one_axis()
    action, part = WRONG[what]
    assert part in str(raised(lambda: action(mesh)))
    assert comm.exchange(rank, mesh) == list(range(world_size))


def test_more_than_one_axis():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(RankError, match="2 axes"):
            comm.all_reduce(torch.ones(3), mesh)
        # A group whose ranks do not exist has no link.
        assert not comm.announce_failure(mesh["tp"], "before the first collective")
        assert not comm.is_linked(mesh["tp"])
        assert not comm.announce_failure(mesh["tp"], "after it")
        assert comm.all_reduce(torch.ones(3), mesh["tp"]).shape == (3,)
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2, 3)
def test_announced_failure(rank, world_size):
    mesh = one_axis()
    comm.exchange(0, mesh)
    for turn in range(4):
        if rank == 1:
            time.sleep(0.2 * (turn % 2))  # the others wait already, or come later
            assert comm.announce_failure(mesh, "the disk is full")
        else:
            time.sleep(0.2 * (1 - turn % 2))
            error = raised(lambda: comm.all_reduce(torch.ones(3), mesh))
            assert "rank 1: the disk is full" in str(error)
            assert error.rank == 1
        # Heard once; the axis can be used again.
        assert comm.exchange(rank, mesh) == list(range(world_size))
        assert comm.is_linked(mesh)


@pytest.mark.ranks(3)
def test_a_failure_reaches_every_kind_of_collective(rank):
    mesh = one_axis()
    x = torch.ones(300_000)
    actions = {
        "exchange": lambda: comm.exchange(0, mesh),
        "all_reduce": lambda: comm.all_reduce(x, mesh),
        "all_gather": lambda: comm.all_gather(x, mesh, 0),
        "reduce_scatter": lambda: comm.reduce_scatter(x, mesh, 0),
        "broadcast": lambda: comm.broadcast(x, mesh, 1),
    }
    names = sorted(actions)
    for turn in range(len(names)):
        comm.exchange(0, mesh)
        if rank == 0:
            comm.announce_failure(mesh, ValueError("too long"))
        else:
            name = names[(turn + rank) % len(names)]  # each in another one
            error = raised(actions[name])
            assert "rank 0: ValueError: too long" in str(error)
            assert str(error).startswith(name)
        assert comm.exchange(rank, mesh) == [0, 1, 2]


@pytest.mark.ranks(2, 3)
def test_a_failure_of_all_ranks_alike(rank, world_size):
    """All fail and all say so: each has its own error, and none hears of the others'."""
    mesh = one_axis()
    for turn in range(12):
        assert comm.exchange(turn, mesh) == [turn] * world_size
        assert comm.all_reduce(torch.ones(40_000), mesh).eq(world_size).all()
        if turn % 3 == rank:
            time.sleep(0.02)
        for _ in range(turn % 3):  # the second time before anything else has been sent
            with pytest.raises(IndexError), comm.announcing(mesh):
                fail()
    group_of(mesh).close()  # as before the first collective
    dist.barrier()
    with pytest.raises(IndexError), comm.announcing(mesh):
        fail()
    assert comm.exchange(rank, mesh) == list(range(world_size))


@pytest.mark.ranks(2, 3)
def test_one_failure_announced_twice_is_one(rank, world_size):
    mesh = one_axis()
    comm.exchange(0, mesh)

    def forward():
        if rank == 0:
            raise IndexError("7")
        comm.all_reduce(torch.ones(3), mesh)

    def step():
        try:
            with comm.announcing(mesh), comm.announcing(mesh):
                forward()
        except IndexError as error:
            assert comm.announce_failure(mesh, error)
            assert comm.announce_failure(None, "7, in other words")
            with pytest.raises(RuntimeError), comm.announcing(mesh):
                raise RuntimeError("failed") from error
        except RankError as error:
            assert "rank 0: IndexError: 7" in str(error)
            # What a collective raised the others know.
            assert comm.announce_failure(mesh, error)

    for _ in range(3):
        step()
        assert comm.exchange(rank, mesh) == list(range(world_size))
    # Mutation: not remembered, the others hear of it again.
    with mutation.patched(control, "is_announced", lambda error: False):
        step()
    heard = 0
    while True:
        try:
            comm.exchange(0, mesh)
            break
        except RankError:
            heard += 1
    assert sum(comm.exchange(heard, mesh)) > 0


@pytest.mark.ranks(2, 3)
def test_two_failures_are_heard_one_after_the_other(rank, world_size):
    """The second comes before the link is made anew, where the others wait already."""
    mesh = one_axis()
    comm.exchange(0, mesh)
    for turn in range(4):
        for text in ("first", "second"):
            if rank == 1:
                time.sleep(0.1 * (turn % 2))
                assert comm.announce_failure(mesh, text)
            else:
                error = raised(lambda: comm.all_reduce(torch.ones(3), mesh))
                assert f"rank 1: {text}" in str(error)
                assert error.rank == 1
        assert comm.exchange(rank, mesh) == list(range(world_size))


@pytest.mark.ranks(2)
def test_without_a_link_an_announcement_does_nothing(rank, world_size):
    mesh = one_axis()
    comm.exchange(0, mesh)
    with comm.through_torch(mesh):
        assert not comm.announce_failure(mesh, "unheard")
        with pytest.raises(IndexError), comm.announcing(mesh):
            fail()
        assert comm.all_reduce(torch.ones(3), mesh).eq(2).all()
    assert comm.exchange(rank, mesh) == [0, 1]
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    assert comm.announce_failure(alone, "nobody to tell")


@pytest.mark.ranks(2)
def test_a_failure_in_the_backward(rank):
    mesh = one_axis()
    comm.exchange(0, mesh)
    x = torch.ones(3, requires_grad=True)
    y = comm.copy_to(x * 1, mesh) * 2
    if rank == 0:
        y.register_hook(lambda grad: grad[7])
        with pytest.raises(IndexError), comm.announcing(mesh):
            y.sum().backward()
    else:
        error = raised(y.sum().backward)
        assert "rank 0: IndexError" in str(error)
    assert comm.exchange(rank, mesh) == [0, 1]


@pytest.mark.ranks(3)
def test_failure_announced_before_the_first_collective(rank, world_size):
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))["tp"]
    assert group_of(mesh).transport is None or group_of(mesh).size == 3
    if group_of(mesh).transport is not None:
        comm.announce_failure(mesh, "reset")
        group_of(mesh).transport = None
    dist.barrier()
    if rank == 2:
        comm.announce_failure(None, "no such file")
    else:
        error = raised(lambda: comm.exchange(0, mesh), within_s=2)
        assert "rank 2: no such file" in str(error)
        assert error.rank == 2
    assert comm.exchange(rank, mesh) == [0, 1, 2]


@pytest.mark.ranks(2, 3)
def test_a_rank_that_does_not_come(rank, world_size):
    mesh = one_axis()
    comm.exchange(0, mesh)
    before = comm.set_timeout(mesh, 1.0)
    late = world_size - 1
    if rank == late:
        time.sleep(2.0)
        error = raised(lambda: comm.all_reduce(torch.ones(3), mesh))
        assert f"gave up waiting for rank {late}" in str(error)
    else:
        start = time.monotonic()
        error = raised(lambda: comm.all_reduce(torch.ones(3), mesh))
        assert 0.9 < time.monotonic() - start < 2.5
        if "gave up" not in str(error):  # two that wait may hear of it from each other
            assert f"rank {late} did not come" in str(error)
            assert "all_reduce of float32 (3,) (sum)" in str(error)
            assert error.rank == late
    assert comm.set_timeout(mesh, before) == 1.0
    assert comm.exchange(rank, mesh) == list(range(world_size))


@pytest.mark.ranks(2)
def test_torch_errors_are_wrapped(rank):
    mesh = one_axis()
    with comm.through_torch(mesh):
        x = torch.ones(3).to(torch.float8_e4m3fn)  # gloo cannot add these
        error = raised(lambda: comm.all_reduce(x, mesh))
    assert "all_reduce of a torch.float8_e4m3fn tensor (3,) among ranks [0, 1]" in str(error)
    assert f"on rank {rank}" in str(error)


def _one_is_killed(when):
    mesh = one_axis()
    rank = dist.get_rank()
    if when != "before":
        comm.exchange(0, mesh)
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "at work":
        time.sleep(1.0)
    start = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            comm.all_reduce(torch.ones(100_000), mesh)
        except RankError as error:
            texts.append((error.rank, str(error)))
    return time.monotonic() - start, texts


@pytest.mark.parametrize("when", ["waiting", "at work"])
def test_a_killed_rank_is_named(when):
    outcomes = run_ranks(_one_is_killed, 4, when, check=False, grace=20)
    assert outcomes[2].status != "passed"
    for rank in (0, 1, 3):
        seconds, texts = outcomes[rank].value
        assert seconds < 3
        # The second time there is no waiting: without that rank there will be no new link.
        assert [number for number, _ in texts] == [2, 2]
        assert all("the process of rank 2 has ended" in text for _, text in texts)
        assert "all_reduce of float32 (100000,) (sum)" in texts[0][1]


def _transport_name(rank_without_memory):
    from plait.comm.link import rendezvous, segment

    mesh = one_axis()
    if dist.get_rank() == rank_without_memory:

        def refuse(*args):
            raise OSError("no memory")

        segment.create = segment.Segment = rendezvous.segment.Segment = refuse
    total = comm.all_reduce(torch.ones(3), mesh)
    assert total.eq(3).all()
    return type(transport_of(group_of(mesh))).__name__


@pytest.mark.parametrize("rank", [0, 1])
def test_without_shared_memory_all_ranks_use_torch(rank):
    assert run_ranks(_transport_name, 3, rank) == ["TorchTransport"] * 3
