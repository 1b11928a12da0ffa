"""The border of `copy_to`: shared by siblings, only as long as it is what its tensor is."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from plait import comm
from plait.comm import border, pairs
from plait.testing import mutation


def one_axis(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


@pytest.mark.ranks(2)
def test_the_border_follows_the_tensor(world_size):
    mesh = one_axis(world_size)
    leaf = torch.ones(3, requires_grad=True)
    h = leaf * 2
    border = comm.copy_to(h, mesh)
    assert comm.copy_to(h, mesh) is border
    assert comm.copy_to(h.view(3), mesh) is not border  # another tensor object
    h.add_(1)
    changed = comm.copy_to(h, mesh)
    assert changed is not border
    assert changed.eq(3).all()
    with torch.no_grad():
        assert comm.copy_to(h, mesh) is h
    assert comm.copy_to(h.detach(), mesh).grad_fn is None
    assert comm.copy_to(leaf, mesh) is not comm.copy_to(leaf, mesh)
    # Two axes, two borders.
    other = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    if comm.group.group_of(other) is not comm.group.group_of(mesh):
        assert comm.copy_to(h, other) is not changed
    assert comm.copy_to(h, mesh) is changed


CHANGES = {
    "detach_": lambda h: h.detach_().requires_grad_(),
    "data": lambda h: setattr(h, "data", torch.full((3,), 7.0)),
    "set_": torch.no_grad()(lambda h: h.set_(torch.full((3,), 7.0))),
    "strides": torch.no_grad()(lambda h: h.set_(h.untyped_storage(), 0, (3,), (0,))),
    "in place": lambda h: h.mul_(5),
    "in place, unrecorded": torch.no_grad()(lambda h: h.mul_(5)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_border_ends_with_what_it_was_made_of(change, world_size):
    """What a sibling sees after `h` was changed is what it would see in one process."""
    mesh = one_axis(world_size)

    def run(to_ranks):
        leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        h = leaf * 2
        to_ranks(h)
        CHANGES[change](h)
        out = (to_ranks(h) * torch.tensor([1.0, 10.0, 100.0])).sum()
        out.backward()
        return out.item(), leaf.grad, h.grad if h.is_leaf else None

    def check():
        out, *grads = run(lambda h: comm.copy_to(h, mesh))
        want, *want_grads = run(lambda h: h)
        assert out == want
        for got, expected in zip(grads, want_grads, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected * world_size)

    check()

    def first(x, group):
        borders = x.__dict__.get(border._ATTRIBUTE)
        return borders.entries[0][1] if borders else None

    with mutation.must_fail(pairs, "find_border", first, raises=(AssertionError, RuntimeError)):
        check()


MODIFICATIONS = {
    "add_": lambda b: b.add_(1),
    "relu_": torch.relu_,
    "view": lambda b: b.view(1, 3)[0].add_(1),
    "dropout": lambda b: torch.nn.functional.dropout(b, 0.5, inplace=True),
    "detach_": lambda b: b.detach_(),
    "unrecorded": lambda b: torch.no_grad()(b.mul_)(5) is b and b.sum(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", sorted(MODIFICATIONS))
def test_a_border_modified_in_place_is_refused(how, world_size):
    """Not a gradient that lacks the operation: `h` would change, and its graph not know."""
    mesh = one_axis(world_size)

    def check():
        leaf = torch.ones(3, requires_grad=True)
        h = leaf * 2
        with pytest.raises(RuntimeError, match="view"):
            MODIFICATIONS[how](comm.copy_to(h, mesh))
        # The next sibling gets h as it is now.
        b = comm.copy_to(h, mesh)
        assert torch.equal(b, h)
        b.sum().backward()
        assert leaf.grad.eq(2 * world_size).all()

    check()

    def no_view(ctx, x, mesh):
        ctx.mesh = mesh
        return x.detach()

    with mutation.must_fail(
        pairs._CopyTo, "forward", staticmethod(no_view), raises=pytest.fail.Exception
    ):
        check()


@pytest.mark.ranks(2)
def test_an_input_changed_after_its_borders_were_used(world_size):
    """Nothing that a border's users keep for their backward: no harm, and no complaint."""
    mesh = one_axis(world_size)
    leaf = torch.ones(3, requires_grad=True)
    h = leaf * 2
    y = (comm.copy_to(h, mesh) * 3).sum()
    h.add_(1)
    (y + h.sum()).backward()
    assert leaf.grad.eq(2 * 3 * world_size + 2).all()
    # Kept: an error, as in one process.
    h = leaf * 2
    y = comm.copy_to(h, mesh).square().sum()
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.backward()


@pytest.mark.ranks(2)
def test_grad_modes_and_tensors_without_a_version(world_size):
    mesh = one_axis(world_size)
    h = torch.ones(3, requires_grad=True) * 2
    b = comm.copy_to(h, mesh)
    with torch.no_grad():
        assert comm.copy_to(h, mesh) is h
    with torch.inference_mode():
        assert comm.copy_to(h, mesh) is h
        x = torch.ones(3, requires_grad=True)
        assert comm.copy_to(x, mesh) is x
    with torch.no_grad(), torch.enable_grad():
        assert comm.copy_to(h, mesh) is b
    # x has no version; nor has a border of it, which is no leaf.
    for _ in range(2):
        once = comm.copy_to(x, mesh)
        assert comm.copy_to(once, mesh) is not comm.copy_to(once, mesh)
    # No memory to compare, and no values either.
    meta = torch.ones(3, device="meta", requires_grad=True) * 2
    assert comm.copy_to(meta, mesh) is comm.copy_to(meta, mesh)
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True) * 2
        assert comm.copy_to(fake, mesh) is comm.copy_to(fake, mesh)


@pytest.mark.ranks(2)
def test_the_border_dies_with_the_tensor(world_size):
    mesh = one_axis(world_size)
    gc.collect()
    gc.disable()
    try:
        for make in (lambda x: x * 2, torch.exp, torch.tanh, torch.relu, lambda x: x.view(-1)):
            leaf = torch.ones(1000, requires_grad=True)
            h = make(leaf)
            border = comm.copy_to(h, mesh)
            watch = [weakref.ref(h), weakref.ref(border), weakref.ref(leaf)]
            (border * border).sum().backward()
            del leaf, h, border
            assert [w() for w in watch] == [None, None, None]
        # And without a backward.
        h = torch.ones(3, requires_grad=True) * 2
        out = comm.copy_to(h, mesh).exp()
        watch = weakref.ref(h)
        del h, out
        assert watch() is None
    finally:
        gc.enable()
