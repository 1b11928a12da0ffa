"""Layout → device mesh: names, neighbours, coordinates, refusals."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plait import mesh as meshes
from plait.errors import LayoutError
from plait.layout import AXES, Layout, ParallelismConfig


def layout_of(**sizes):
    return Layout({axis: sizes.get(axis, 1) for axis in AXES})


@pytest.mark.ranks(2, 3, 4)
def test_tp_alone_is_the_whole_world(rank, world_size):
    mesh = meshes.build(ParallelismConfig(tp_size=world_size).resolve(world_size), "cpu")
    assert mesh.mesh_dim_names == ("tp",)
    assert meshes.axis(mesh, "tp") is mesh
    assert mesh.get_group("tp").size() == world_size
    assert meshes.coordinates(mesh) == f"rank {rank} (tp {rank})"


@pytest.mark.ranks(4)
def test_tp_varies_fastest(rank):
    mesh = meshes.build(layout_of(dp_replicate=2, tp=2), "cpu")
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    tp = meshes.axis(mesh, "tp")
    assert (tp.ndim, tp.size()) == (1, 2)
    assert dist.get_process_group_ranks(tp.get_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert tp.get_local_rank() == rank % 2
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=tp.get_group())
    assert x.item() == (1.0 if rank < 2 else 5.0)
    copies = meshes.axis(mesh, "dp_replicate")
    assert dist.get_process_group_ranks(copies.get_group()) == [rank % 2, rank % 2 + 2]
    assert meshes.coordinates(mesh) == (
        f"rank {rank} (dp_replicate {rank // 2}, dp_shard 0, tp {rank % 2})"
    )


@pytest.mark.ranks(2)
def test_tp_is_always_an_axis(rank):
    mesh = meshes.build(layout_of(dp_shard=2), "cpu")
    assert mesh.mesh_dim_names == ("dp_shard", "tp")
    assert meshes.axis(mesh, "tp").size() == 1
    assert meshes.coordinates(mesh) == f"rank {rank} (dp_shard {rank}, tp 0)"


@pytest.mark.ranks(2)
def test_refusals():
    with pytest.raises(
        LayoutError, match="dp_shard 2 × tp 2 = 4 ranks, but the process group has 2"
    ):
        meshes.build(layout_of(dp_shard=2, tp=2), "cpu")
    with pytest.raises(LayoutError, match="have the names dp"):
        meshes.axis(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "tp")
    with pytest.raises(LayoutError, match="have no names"):
        meshes.axis(init_device_mesh("cpu", (2,)), "tp")


@pytest.mark.ranks(3)
def test_a_rank_outside_the_mesh_says_so(rank):
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    expected = f"rank {rank} (tp {rank})" if rank < 2 else "rank 2 (not on the mesh)"
    assert meshes.coordinates(mesh) == expected


def test_no_process_group():
    with pytest.raises(LayoutError, match="there is no process group"):
        meshes.build(layout_of(tp=2), "cpu")
