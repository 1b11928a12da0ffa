"""From DTensor parameters to local tensors, and the gradients back."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from plait import comm
from plait.comm import parameters
from plait.errors import RankError
from plait.testing import mutation


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def parameter(mesh, placement, shape=(6, 5), requires_grad=True):
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    return torch.nn.Parameter(
        distribute_tensor(whole, mesh, [placement], src_data_rank=None), requires_grad
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_gradient_is_a_dtensor_like_the_parameter(placement, rank, world_size):
    mesh = one_axis(world_size)
    p = parameter(mesh, placement)
    with comm.count() as c:
        local = comm.local(p)
        assert type(local) is torch.Tensor
        assert local.data_ptr() == p._local_tensor.data_ptr()
        assert not p._local_tensor.requires_grad
        (local * local).sum().backward()
    assert c == {}
    assert isinstance(p.grad, DTensor)
    assert p.grad.placements == p.placements
    assert p.grad.shape == p.shape
    assert torch.equal(p.grad.full_tensor(), p.full_tensor() * 2)
    # Accumulation into an existing gradient, twice through one local tensor.
    local = comm.local(p)
    loss = (local * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(p.grad.full_tensor(), p.full_tensor().detach() * 2 + 6)
    (alone,) = torch.autograd.grad((comm.local(p) * 5).sum(), p)
    assert isinstance(alone, DTensor)
    assert alone.full_tensor().eq(5).all()
    optimizer = torch.optim.AdamW([p])
    optimizer.step()
    assert torch.isfinite(p.full_tensor()).all()


@pytest.mark.ranks(2, 3)
def test_summed_gradient(rank, world_size):
    mesh = one_axis(world_size)

    def check():
        p = parameter(mesh, Replicate())
        with comm.count() as c:
            (comm.local(p, grad="sum") * (rank + 1)).sum().backward()
        assert p.grad.to_local().eq(sum(range(1, world_size + 1))).all()
        assert c == {"all_reduce": 1}
        assert c.backward == {"all_reduce": 1}

    check()
    with mutation.must_fail(parameters.raw, "all_reduce", lambda x, mesh: x):
        check()


@pytest.mark.ranks(2)
def test_no_record_no_new_tensor(world_size):
    mesh = one_axis(world_size)
    p = parameter(mesh, Shard(0))
    with torch.no_grad():
        assert comm.local(p) is p._local_tensor
        assert comm.local(p, grad="sum") is p._local_tensor
    with torch.inference_mode():
        assert comm.local(p) is p._local_tensor
    frozen = parameter(mesh, Shard(0), requires_grad=False)
    assert comm.local(frozen) is frozen._local_tensor
    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (comm.local(frozen) @ x).sum().backward()
    assert frozen.grad is None
    assert x.grad is not None


@pytest.mark.ranks(2)
def test_gradient_is_kept_without_a_copy(world_size):
    mesh = one_axis(world_size)
    p = parameter(mesh, Shard(1), (4, 6))
    seen = []
    local = comm.local(p)
    local.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (torch.ones(3, 4, dtype=torch.float64) @ local).sum().backward()
    assert p.grad._local_tensor.data_ptr() == seen[0]
    # A gradient that arrives transposed takes the parameter's strides.
    p.grad = None
    (comm.local(p).t() @ torch.rand(4, 3, dtype=torch.float64)).sum().backward()
    assert p.grad._local_tensor.stride() == p._local_tensor.stride()


@pytest.mark.ranks(4)
def test_strided_shards_and_two_axes(rank, world_size):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = torch.arange(64, dtype=torch.float64).view(8, 8)
    split = distribute_tensor(whole, both["tp"], [Shard(0)], src_data_rank=None)
    p = torch.nn.Parameter(
        DTensor.from_local(
            split.to_local()[4 * 0 : 2] * 1,
            both,
            [_StridedShard(0, split_factor=2), Shard(0)],
            run_check=False,
        )
    )
    local = comm.local(p)
    (local * local).sum().backward()
    assert p.grad.placements == p.placements
    assert p.grad.device_mesh == both
    assert torch.equal(p.grad.to_local(), local.detach() * 2)
    with pytest.raises(RankError, match="2 axes"):
        comm.local(p, grad="sum")
    p.grad = None
    comm.local(p, grad="sum", mesh=both["tp"]).sum().backward()
    assert p.grad.to_local().eq(2).all()


@pytest.mark.ranks(2)
def test_fully_sharded_over_another_axis(world_size):
    """FSDP2 hands the forward tensor-parallel parameters that it has just put together."""
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))

    class Column(torch.nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.arange(48.0).view(8, 6)
            self.weight = torch.nn.Parameter(
                distribute_tensor(whole, both["tp"], [Shard(0)], src_data_rank=None)
            )

        def forward(self, x):
            return x @ comm.local(self.weight).t()

    module = Column()
    fully_shard(module, mesh=both["dp_shard"])
    module(torch.ones(3, 6)).sum().backward()
    assert module.weight.grad.full_tensor().eq(3).all()
    assert module.weight.grad.placements == module.weight.placements


@pytest.mark.ranks(2)
def test_plain_parameters(rank, world_size):
    mesh = one_axis(world_size)
    p = torch.nn.Parameter(torch.ones(3))
    assert comm.local(p) is p
    (comm.local(p, grad="sum", mesh=mesh) * (rank + 1)).sum().backward()
    assert p.grad.eq(3).all()
    with pytest.raises(RankError, match="not a DTensor"):
        comm.local(p, grad="sum")
