"""The link itself: nothing is left behind, nothing gets out of step, many groups in one process."""

import contextlib
import gc
import os
import random
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plait import comm
from plait.comm.group import group_of, open_groups, transport_of
from plait.comm.link import segment
from plait.errors import RankError
from plait.testing import mutation, run_ranks


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def num_maps(name="plait-link"):
    with open("/proc/self/maps") as file:
        return sum(name in line for line in file)


def num_descriptors():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    found = 0
    for link in links:
        with contextlib.suppress(OSError):
            found += "plait-link" in os.readlink(link)
    return found


def _groups_come_and_go(directory):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    named = num_maps("/dev/shm/")
    kept = []
    for turn in range(12):
        store = dist.FileStore(os.path.join(directory, f"{turn // 2}"), world_size)
        store = dist.PrefixStore(str(turn), store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        mesh = one_axis(world_size)
        kept.append(mesh)  # DTensor's caches keep meshes too
        assert comm.is_linked(mesh)
        assert comm.all_reduce(torch.ones(5000), mesh).eq(world_size).all()
        halves = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("tp", "cp"))
        assert comm.exchange(turn, halves["tp"]) == [turn] * world_size
        # Another mesh of the same process group shares its link.
        assert transport_of(group_of(halves["tp"])) is transport_of(group_of(halves["tp"]))
        assert num_maps() <= 2
        assert num_maps("/dev/shm/") == named  # no name to leave behind, even if killed now
        dist.destroy_process_group()
    assert open_groups() == []
    gc.collect()
    return num_maps(), num_descriptors()


def test_groups_come_and_go_without_a_trace():
    with tempfile.TemporaryDirectory() as directory:
        assert run_ranks(_groups_come_and_go, 2, directory) == [(0, 0), (0, 0)]


@pytest.mark.ranks(2)
def test_the_memory_is_small(world_size):
    for size in (2, 3, 4, 8, 16, 64):
        assert segment.segment_bytes(size) <= 16 << 20
        assert segment.slot_bytes(size) >= 64 << 10
        assert segment.slot_bytes(size) % 4096 == 0


@pytest.mark.ranks(2, 3, 4)
def test_random_collectives_at_random_moments(rank, world_size):
    """Hundreds of collectives of random kinds and sizes, the ranks never in the same phase."""
    mesh = one_axis(world_size)
    shared, own = random.Random(1), random.Random(100 + rank)
    for _ in range(500):
        kind = shared.randrange(6)
        shape = (shared.choice([0, 1, 3, 4]), shared.choice([1, 2, 17, 257]))
        dim = shared.randrange(2)
        value = shared.randrange(100)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
        x = torch.full(shape, float(value + rank))
        total = float(sum(value + r for r in range(world_size)))
        if kind == 0:
            assert comm.all_reduce(x, mesh).eq(total).all()
        elif kind == 1:
            assert comm.all_reduce(x, mesh, "max").eq(value + world_size - 1).all()
        elif kind == 2:
            whole = comm.all_gather(x, mesh, dim)
            for r, piece in enumerate(whole.chunk(world_size, dim)):
                assert piece.eq(value + r).all()
        elif kind == 3:
            assert comm.reduce_scatter(x, mesh, dim).eq(total).all()
        elif kind == 4:
            src = value % world_size
            assert comm.broadcast(x, mesh, src).eq(value + src).all()
        else:
            assert comm.exchange(rank * value, mesh) == [r * value for r in range(world_size)]


@pytest.mark.ranks(2)
def test_waiting_is_what_keeps_ranks_apart(rank, world_size):
    """Mutation: without the wait for the peers the sums are made of old slots."""
    mesh = one_axis(world_size)
    comm.exchange(0, mesh)
    meeting_of = transport_of(group_of(mesh)).meeting

    def check():
        for turn in range(50):
            if rank == turn % 2:
                time.sleep(0.002)
            assert comm.all_reduce(torch.full((3,), float(turn)), mesh).eq(2 * turn).all()

    check()

    def no_wait(peer, step, header):
        return None

    with mutation.must_fail(meeting_of, "_wait", no_wait):
        for turn in range(50):
            if rank == turn % 2:
                time.sleep(0.002)
            got = comm.all_reduce(torch.full((3,), float(turn)), mesh)
            if not got.eq(2 * turn).all():
                noticed = True
                break
        else:
            noticed = False
        assert not noticed
    dist.barrier()
    group_of(mesh).close()  # the two counted on differently; a new link for the next test
    assert comm.all_reduce(torch.ones(3), mesh).eq(2).all()


@pytest.mark.ranks(2)
def test_a_rank_that_waits_long_sleeps(rank, world_size):
    mesh = one_axis(world_size)
    comm.exchange(0, mesh)
    if rank == 1:
        time.sleep(1.0)
    start = time.process_time()
    comm.all_reduce(torch.ones(3), mesh)
    assert time.process_time() - start < 0.3


@pytest.mark.ranks(2)
def test_other_threads_run_while_a_rank_waits(rank, world_size):
    mesh = one_axis(world_size)
    comm.exchange(0, mesh)
    beats = []
    done = threading.Event()

    def beat():
        while not done.wait(0.01):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    if rank == 1:
        time.sleep(0.6)
    comm.all_reduce(torch.ones(3), mesh)
    done.set()
    thread.join()
    assert len(beats) > 10


@pytest.mark.ranks(2, 3)
def test_interrupted_wait(rank, world_size):
    mesh = one_axis(world_size)
    comm.exchange(0, mesh)
    if rank == 0:
        link = transport_of(group_of(mesh)).meeting

        def interrupt(*args):
            raise KeyboardInterrupt

        with mutation.patched(link, "_wait_long", interrupt), pytest.raises(KeyboardInterrupt):
            comm.all_reduce(torch.ones(3), mesh)
    else:
        time.sleep(0.3)
        with pytest.raises(RankError, match="rank 0 was interrupted in all_reduce"):
            comm.all_reduce(torch.ones(3), mesh)
    assert comm.exchange(rank, mesh) == list(range(world_size))
