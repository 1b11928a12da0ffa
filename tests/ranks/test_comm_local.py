"""From DTensor parameters to local tensors, and the gradients back."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

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


def linear_paths(mesh):
    """Results whose backward makes a new gradient for every parameter."""
    linear = torch.nn.functional.linear
    weight, bias = parameter(mesh, Replicate(), (4, 3)), parameter(mesh, Replicate(), (4, 1))
    for shape in ((2, 5, 3), (5, 3), (3,)):
        for leaf in (False, True):
            x = torch.rand(shape, dtype=torch.float64).requires_grad_(leaf)
            yield linear(x, comm.local(weight)).square().sum()
            yield linear(x, comm.local(weight), comm.local(bias).flatten()).square().sum()
    for reentrant in (True, False):
        x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
        y = checkpoint(lambda x: linear(x, comm.local(weight)), x, use_reentrant=reentrant)
        yield y.square().sum()
    yield torch.nn.functional.embedding(torch.tensor([1, 2, 1]), comm.local(weight)).sum()
    yield (x[:4].detach() * comm.local(weight)).sum()


@pytest.mark.ranks(2)
def test_the_gradient_of_a_linear_layer_is_not_copied(world_size):
    mesh = one_axis(world_size)

    def refuse(grad, strides):
        raise AssertionError("copied")

    def check():
        with mutation.patched(parameters, "_copied", refuse):
            for out in linear_paths(mesh):
                out.backward()

    check()
    with mutation.must_fail(parameters, "counts_of_new", frozenset):
        check()


def alias(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


SHARED = {
    "added": lambda x, a, b: x * (a + b),
    "both added to the input": lambda x, a, b: x + (a + b),
    "two views": lambda x, a, b: x.view(-1) * (a.view(-1) + b.view(-1)),
    "joined": lambda x, a, b: torch.cat([x, x]) * torch.cat([a, b]),
    "transposed": lambda x, a, b: (x.t() * (a.t() + b.t())).t(),
    "stacked": lambda x, a, b: x * torch.stack([a, b]).sum(0),
}


def check_shared(mesh, name, placement):
    """Three backwards and a clipping, as with plain parameters."""
    a, b = parameter(mesh, placement), parameter(mesh, placement)
    x = torch.rand(a._local_tensor.shape, dtype=torch.float64)
    plain = [torch.nn.Parameter(p._local_tensor.detach().clone()) for p in (a, b)]
    total = [torch.zeros_like(p) for p in plain]
    for _ in range(3):
        SHARED[name](x, comm.local(a), comm.local(b)).sum().backward()
        for so_far, grad in zip(
            total, torch.autograd.grad(SHARED[name](x, *plain).sum(), plain), strict=True
        ):
            so_far += grad
    ours = [p.grad._local_tensor for p in (a, b)]
    assert not alias(*ours)
    for got, want in zip(ours, total, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    before = [grad.clone() for grad in ours]
    norm = torch.nn.utils.clip_grad_norm_([a, b], 1e-3)
    factor = 1e-3 / (norm.full_tensor() + 1e-6)
    for got, unclipped in zip(ours, before, strict=True):
        torch.testing.assert_close(got, unclipped * factor, rtol=1e-9, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", sorted(SHARED))
def test_a_gradient_of_two_parameters_is_two(name, placement, world_size):
    check_shared(one_axis(world_size), name, placement)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["added", "two views"])
def test_shared_gradients_need_the_count_of_holders(name, world_size):
    """Mutation: every gradient is taken for a new one."""
    new = min(parameters.counts_of_new())
    with mutation.must_fail(parameters, "holders", lambda x: new):
        check_shared(one_axis(world_size), name, Replicate())


class Gives(torch.autograd.Function):
    """A function of the user whose backward gives what it likes."""

    @staticmethod
    def forward(ctx, x, give):
        ctx.give = give
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.give(), None


def givers(shape):
    """Gradients of ones, and what else shows their memory."""
    ones = torch.ones(shape, dtype=torch.float64)
    array = np.ones(shape)
    held = [ones, torch.from_numpy(array)]

    def new(keep):
        x = torch.ones(shape, dtype=torch.float64)
        held.append(keep(x))
        return x

    storages = []

    def with_storage():
        x = torch.ones(shape, dtype=torch.float64)
        storages.append(x.untyped_storage())
        return x

    give = {
        "constant": lambda: ones,
        "view of a constant": lambda: ones[:],
        "detached": ones.detach,
        "array": lambda: torch.from_numpy(array),
        "object kept": lambda: new(lambda x: x),
        "view kept": lambda: new(lambda x: x[0]),
        "alias kept": lambda: new(lambda x: x.detach()),
        "storage kept": with_storage,
    }
    shown = lambda: [*held, *(torch.DoubleTensor(s) for s in storages)]  # noqa: E731
    return give, shown


@pytest.mark.ranks(2)
def test_a_gradient_that_somebody_holds(world_size):
    mesh = one_axis(world_size)
    p = parameter(mesh, Replicate())
    give, shown = givers(tuple(p.shape))
    for name, function in give.items():
        p.grad = None
        for _ in range(2):
            Gives.apply(comm.local(p), function).backward()
        assert p.grad._local_tensor.eq(2).all(), name
        assert all(x.eq(1).all() for x in shown()), name


@pytest.mark.ranks(2)
def test_the_callers_gradient_and_a_hooks(world_size):
    mesh = one_axis(world_size)
    p = parameter(mesh, Replicate())
    zeros = torch.zeros(tuple(p.shape), dtype=torch.float64)
    ones = torch.ones_like(zeros)
    for own in (ones, torch.ones((), dtype=torch.float64).expand(zeros.shape)):
        p.grad = None
        for _ in range(2):
            (comm.local(p) + zeros).backward(own)
        assert p.grad._local_tensor.eq(2).all()
        assert own.eq(1).all()
        assert not alias(p.grad._local_tensor, own)
    p.grad = None
    (comm.local(p) + zeros).sum().backward()  # a sum's gradient is expanded
    assert p.grad._local_tensor.stride() == p._local_tensor.stride()
    p.grad = None
    seen = []
    local = comm.local(p)
    local.register_hook(seen.append)
    (local * ones).sum().backward(retain_graph=True)
    (local * ones).sum().backward()
    assert all(grad.eq(1).all() for grad in seen)
    assert p.grad._local_tensor.eq(2).all()


@pytest.mark.ranks(2)
def test_summed_gradient_of_one_rank_is_its_own(world_size):
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    a, b = parameter(mesh, Replicate()), parameter(mesh, Replicate())
    x = torch.rand(tuple(a.shape), dtype=torch.float64)
    for _ in range(3):
        (x * (comm.local(a, grad="sum") + comm.local(b, grad="sum"))).sum().backward()
    assert not alias(a.grad._local_tensor, b.grad._local_tensor)
    torch.testing.assert_close(a.grad._local_tensor, 3 * x)
    torch.testing.assert_close(b.grad._local_tensor, 3 * x)


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
