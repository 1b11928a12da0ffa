"""The differentiable pairs: each is the other's adjoint, and the border of `copy_to` is shared."""

import contextlib
import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from plait import comm
from plait.comm import pairs, raw
from plait.errors import PlaitError
from plait.testing import mutation, run_ranks


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def same(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def own(shape, rank, seed=0, dtype=torch.float64):
    return same(shape, 1000 * (rank + 1) + seed, dtype)


def dot(x, y, mesh, alike):
    """The inner product of two distributed vectors; a value held alike by all counts once."""
    local = (x * y).sum()
    return local.item() if alike else comm.all_reduce(local, mesh).item()


# name: (function of (x, mesh), is the input alike on all ranks, is the output alike)
def cases(world_size):
    sizes = (4, 1, 0, 2)[:world_size]
    num = sum(sizes)
    return {
        "copy_to": (pairs.copy_to, (3, num), True, (3, num), False),
        "sum_from": (pairs.sum_from, (3, num), False, (3, num), True),
        "sum_from_fresh": (
            lambda x, mesh: pairs.sum_from(x + 0, mesh, fresh=True),
            (3, num),
            False,
            (3, num),
            True,
        ),
        "split_to": (
            lambda x, mesh: pairs.split_to(x, mesh, 1, sizes),
            (3, num),
            True,
            (3, sizes),
            False,
        ),
        "gather_from": (
            lambda x, mesh: pairs.gather_from(x, mesh, -1, sizes),
            (3, sizes),
            False,
            (3, num),
            True,
        ),
        "gather_from_unsaid": (
            lambda x, mesh: pairs.gather_from(x, mesh, 1),
            (3, sizes),
            False,
            (3, num),
            True,
        ),
        "scatter_sum": (
            lambda x, mesh: pairs.scatter_sum(x, mesh, 1, sizes),
            (3, num),
            False,
            (3, sizes),
            False,
        ),
        "gather_copy": (
            lambda x, mesh: pairs.gather_copy(x, mesh, 1, sizes),
            (3, sizes),
            False,
            (3, num),
            False,
        ),
    }


def check_adjoint(name, rank, world_size):
    """<A x, y> == <x, Aᵀ y>, where autograd's backward plays Aᵀ."""
    mesh = one_axis(world_size)
    function, in_shape, in_alike, out_shape, out_alike = cases(world_size)[name]

    def vector(shape, alike, seed):
        if isinstance(shape[1], tuple):
            shape = (shape[0], shape[1][rank])
        return same(shape, seed) if alike else own(shape, rank, seed)

    x = vector(in_shape, in_alike, 1).requires_grad_()
    y = vector(out_shape, out_alike, 2)
    out = function(x, mesh)
    assert out.shape == y.shape
    (grad,) = torch.autograd.grad(out, x, y)
    left = dot(out.detach(), y, mesh, out_alike)
    right = dot(x.detach(), grad, mesh, in_alike)
    assert abs(left - right) < 1e-12 * max(1, abs(left))
    if in_alike:
        assert torch.equal(comm.broadcast(grad, mesh), grad)


NAMES = sorted(cases(4))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("through", ["link", "torch"])
def test_pairs_are_adjoint(through, name, rank, world_size):
    mesh = one_axis(world_size)
    with comm.through_torch(mesh) if through == "torch" else contextlib.nullcontext():
        check_adjoint(name, rank, world_size)


def _zeros(x, mesh, dim, sizes):
    return x.new_zeros(3, sum(sizes))


MUTATIONS = {
    "no sum": ("copy_to", "all_reduce", lambda x, mesh: x),
    "summed twice": ("copy_to", "all_reduce", lambda x, mesh: comm.all_reduce(x, mesh) * 2),
    "no forward sum": ("sum_from", "all_reduce", lambda x, mesh: x.clone()),
    "no gather": ("split_to", "all_gather", _zeros),
    "sliced, not summed": ("gather_copy", "reduce_scatter", raw.split),
    "own slice only": ("scatter_sum", "reduce_scatter", raw.split),
    "times n": ("gather_from", "split", comm.reduce_scatter),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("broken", sorted(MUTATIONS))
def test_mutations_break_the_adjoint(broken, rank, world_size):
    name, attribute, replacement = MUTATIONS[broken]
    with mutation.must_fail(pairs.raw, attribute, replacement):
        check_adjoint(name, rank, world_size)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_gradients_of_other_dtypes_and_layouts(dtype, rank, world_size):
    mesh = one_axis(world_size)
    x = same((4, 6), 0, torch.float64).to(dtype).requires_grad_()
    border = comm.copy_to(x * 1, mesh)
    # A transposed and an expanded gradient meet at the border.
    (border.t() * (rank + 1)).sum().abs().backward()
    expected = x.grad.clone()
    assert x.grad.dtype == dtype
    assert torch.equal(comm.broadcast(expected, mesh), expected)
    x.grad = None
    comm.copy_to(x * 1, mesh).sum().abs().backward()
    assert torch.equal(comm.broadcast(x.grad, mesh), x.grad)


@pytest.mark.ranks(2)
def test_a_rank_without_a_gradient_takes_part(rank, world_size):
    mesh = one_axis(world_size)
    x = same((3,), 0).requires_grad_()

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return None if rank == 0 else grad.expand(3) * 5

    Drop.apply(comm.copy_to(x * 2, mesh)).backward()
    assert x.grad.eq(10).all()


@pytest.mark.ranks(2)
def test_second_derivatives_raise(rank, world_size):
    mesh = one_axis(world_size)
    for name in NAMES:
        function, in_shape, *_ = cases(world_size)[name]
        shape = (in_shape[0], in_shape[1][rank] if isinstance(in_shape[1], tuple) else in_shape[1])
        x = own(shape, rank).requires_grad_()
        out = function(x * x, mesh)
        with pytest.raises(PlaitError, match="gradient of a gradient"):
            torch.autograd.grad((out * out).sum(), x, create_graph=True)
        # A gradient that depends on nothing has a gradient of zero; nothing to refuse.
        torch.autograd.grad(function(x * 1, mesh).sum(), x, create_graph=True)


class Attention(torch.nn.Module):
    """q, k and v of one hidden state, each of which asks for the border itself."""

    def __init__(self, mesh, frozen=False):
        super().__init__()
        self.mesh = mesh
        self.norm = torch.nn.LayerNorm(8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 4) for _ in range(3))
        for part in self.parts:
            part.requires_grad_(not frozen)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(comm.copy_to(h, self.mesh)) for part in self.parts)
        return x + comm.sum_from(q * k * v, self.mesh, fresh=True).repeat(1, 2)


def gradients(model, x, run=lambda model, x: model(x)):
    x = x.clone().requires_grad_()
    model.zero_grad()
    with comm.count() as c:
        run(model, x).square().sum().backward()
    params = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return c, [x.grad, *params]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_one_reduction_for_q_k_and_v(frozen, rank, world_size):
    torch.manual_seed(rank)
    mesh = one_axis(world_size)
    model = Attention(mesh, frozen).double()
    for p in model.norm.parameters():
        dist.broadcast(p.data, 0)
    x = same((5, 8), 7)
    c, got = gradients(model, x)
    assert c.forward == {"all_reduce": 1}
    assert c.backward == {"all_reduce": 1}
    assert c.bytes == {"all_reduce": 5 * 4 * 8 + 5 * 8 * 8}
    # Mutation: without sharing there are three, and the gradients are the same.
    with mutation.patched(pairs, "find_border", lambda x, group: None):
        c, want = gradients(model, x)
    assert c.backward == {"all_reduce": 3}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for reentrant in (True, False):
        c, again = gradients(model, x, lambda m, x, r=reentrant: checkpoint(m, x, use_reentrant=r))
        # The border's sum, and, recomputed, that of the forward; without re-entrance torch stops
        # recomputing when it has what it needs, which is before the forward's sum.
        assert c.backward == {"all_reduce": 2 if reentrant else 1}
        for a, b in zip(again, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_tensors_and_meshes_with_attributes_are_saved_and_copied(world_size):
    mesh = one_axis(world_size)
    h = torch.ones(3, requires_grad=True) * 2
    comm.copy_to(h, mesh)
    buffer = io.BytesIO()
    torch.save({"h": h, "p": torch.distributed.tensor.ones(4, device_mesh=mesh)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded["h"].eq(2).all()
    again = loaded["h"].requires_grad_() * 1
    assert comm.copy_to(again, loaded["p"].device_mesh).eq(2).all()
    torch.save(h, buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).eq(2).all()
    twin = copy.deepcopy(torch.distributed.tensor.ones(4, device_mesh=mesh))
    assert comm.exchange(1, twin.device_mesh) == [1] * world_size


@pytest.mark.ranks(2)
def test_a_graph_walked_twice(world_size):
    mesh = one_axis(world_size)
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    y = comm.copy_to(h, mesh).square().sum()
    z = comm.copy_to(h, mesh).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    z.backward()
    assert x.grad.eq((8 + 8 + 2) * world_size).all()


@pytest.mark.ranks(2)
def test_fresh_memory_is_taken_and_a_saved_value_noticed(rank, world_size):
    mesh = one_axis(world_size)
    with torch.no_grad():
        x = torch.ones(3)
        assert comm.sum_from(x, mesh, fresh=True) is x
        assert x.eq(2).all()
        x = torch.ones(3)
        comm.sum_from(x, mesh)
        assert x.eq(1).all()
    # Not fresh after all: exp keeps its result for its backward. That is an error, not a wrong
    # gradient.
    x = torch.ones(3, requires_grad=True)
    y = comm.sum_from(x.exp(), mesh, fresh=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _compiled_against_eager():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = one_axis(world_size)
    sizes = (3, 1)

    def block(x, w):
        h = torch.tanh(x)
        a, b = comm.copy_to(h, mesh), comm.copy_to(h, mesh)
        y = comm.sum_from((a @ w) * b.sum(-1, keepdim=True), mesh, fresh=True)
        y = comm.gather_from(comm.split_to(y, mesh, 1, sizes).sin(), mesh, 1, sizes)
        return comm.gather_copy(comm.scatter_sum(y, mesh, 0), mesh, 0) * (rank + 1)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    results = []
    for function in (block, compiled):
        x = same((4, 4), 1).requires_grad_()
        w = own((4, 4), rank).requires_grad_()
        with torch.no_grad():
            without = function(x, w)
        y = function(x, w)
        y.square().sum().backward()
        assert torch.equal(without, y)
        results.append((y.detach(), x.grad, w.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return comm.is_linked(mesh)


def test_compiled_in_one_graph():
    # In a program of its own, without the checks of annotations that torch.compile cannot trace.
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "[True, True]", done.stdout + done.stderr


if __name__ == "__main__":
    print(run_ranks(_compiled_against_eager, 2))
