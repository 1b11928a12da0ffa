"""How DTensors say which slices a rank holds, and how ranks meet."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from plait.errors import PlanError, RankError
from plait.testing import mutation
from plait.weights import outcome, slots
from plait.weights.slots import layout_of_slot, layout_of_tensor, slots_of


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "placement",
    [
        Replicate(),
        Shard(0),
        Shard(1),
        Shard(-1),
        *(_StridedShard(0, split_factor=n) for n in (2, 3)),
    ],
    ids=str,
)
def test_a_placement_says_which_slices_a_rank_holds(placement, rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    whole = torch.arange(12 * 7.0).view(12, 7)
    x = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module = nn.Module()
    module.w = nn.Parameter(x)

    def check():
        layout = layout_of_slot("w", slots_of(module)["w"], {})
        assert layout == layout_of_tensor("w", x)
        assert not layout.problems()
        if layout.dim is None:
            assert torch.equal(x.to_local(), whole)
            return
        pieces = layout.pieces[rank] or ((0, 0),)
        parts = [whole.narrow(layout.dim, a, b - a) for a, b in pieces]
        assert torch.equal(torch.cat(parts, layout.dim), x.to_local())

    check()
    if isinstance(placement, _StridedShard):
        with mutation.must_fail(
            slots, "packed", lambda shape, dim, n, _: slots.even(shape, dim, n)
        ):
            check()


@pytest.mark.ranks(4)
def test_placements_that_say_too_little(world_size):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(6, 4)
    assert layout_of_tensor("w", x).dim is None
    twice = DTensor.from_local(x, both, [Replicate(), Replicate()], run_check=False)
    assert layout_of_tensor("w", twice).dim is None
    for mesh, placements in ((both, [Shard(0), Shard(1)]), (both["tp"], [Partial()])):
        odd = DTensor.from_local(x, mesh, placements, run_check=False)
        with pytest.raises(PlanError, match="of 'w'"):
            layout_of_tensor("w", odd)
    uneven = DTensor.from_local(
        x[:3], both["tp"], [_StridedShard(0, split_factor=4)], run_check=False
    )
    with pytest.raises(PlanError, match="add up to 4, but the dimension has 6"):
        layout_of_tensor("w", uneven)


@pytest.mark.ranks(2, 3)
def test_ranks_meet(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    assert outcome.meet(mesh, "here", rank) == list(range(world_size))
    assert outcome.meet(None, "here", rank) == [rank]
    with pytest.raises(RankError, match=f"rank {world_size - 1} is at 'there'"):
        outcome.meet(mesh, "there" if rank == world_size - 1 else "here")
    failure = KeyError("k") if rank == 1 else None
    with pytest.raises(KeyError if rank == 1 else RankError) as info:
        outcome.meet(mesh, "here", failure=failure, asked="Reading:")
    if rank != 1:
        assert "Reading:" in str(info.value)
        assert "rank 1 failed: KeyError: 'k'" in str(info.value)
        assert info.value.rank == 1
    # All know: nothing is left to announce, and nobody hears of it again.
    from plait import comm

    assert comm.announce_failure(mesh, info.value)
    assert comm.exchange(rank, mesh) == list(range(world_size))
