"""Noise, tiny models, parity and mutation: the helpers must themselves be able to fail."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.errors import PlaitError
from plait.run import environment
from plait.testing import add_noise, mutation, parity, rank_info, tiny, typecheck


@pytest.fixture
def plain_grads(monkeypatch):
    """`plait.full_grads` for models that are not split."""

    def full_grads(model):
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    monkeypatch.setattr("plait.full_grads", full_grads, raising=False)


@pytest.mark.ranks(2, 3)
def test_models_noise_and_batches_are_equal_on_all_ranks(rank, world_size):
    torch.manual_seed(rank)  # ranks whose own generators differ
    model = add_noise(tiny.model("qwen2"), scale=0.1, seed=3)
    values = [*model.state_dict().values(), *tiny.batch("qwen2").values()]
    mine = torch.cat([value.double().flatten() for value in values])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)
    assert torch.initial_seed() == rank


def test_noise_reaches_every_parameter():
    before, after = tiny.model("qwen2"), add_noise(tiny.model("qwen2"), seed=1)
    other = add_noise(tiny.model("qwen2"), seed=2)
    for (name, a), b, c in zip(
        before.named_parameters(), after.parameters(), other.parameters(), strict=True
    ):
        assert not torch.equal(a, b), name
        assert not torch.equal(b, c), name
        assert 0.05 < (a - b).std() < 0.2, name


@pytest.mark.ranks(2)
def test_noise_after_splitting_is_refused():
    module = torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    module.weight = torch.nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)]))
    with pytest.raises(PlaitError, match="the first is weight"):
        add_noise(module)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_tiny_models_divide_and_compare_equal(name, plain_grads):
    whole, same = add_noise(tiny.model(name)), add_noise(tiny.model(name))
    if name != "mlp":
        text = whole.config.get_text_config()
        for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            assert all(getattr(text, size) % n == 0 for n in (2, 3, 4))
        assert text.vocab_size % 12 == 0
    found = parity.compare(same, whole, tiny.batch(name))
    assert found.largest == 0.0
    # llava's last vision norm is not reached by the loss
    reached = [p for p in whole.parameters() if p.grad is not None]
    assert len(found.grads) == len(reached) >= len(list(whole.parameters())) - 2


@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_compare_notices_one_parameter_off_by_a_billionth(name, plain_grads):
    whole, off = add_noise(tiny.model(name)), add_noise(tiny.model(name))
    last = list(off.parameters())[-1]
    with torch.no_grad():
        last.mul_(1 + 1e-9)
    with pytest.raises(AssertionError, match="off by"):
        parity.compare(off, whole, tiny.batch(name))
    parity.compare(off, whole, tiny.batch(name), tolerance=1e-6)


def test_compare_notices_a_gradient_alone(plain_grads):
    whole, off = add_noise(tiny.model("mlp")), add_noise(tiny.model("mlp"))
    off.up.bias.register_hook(lambda grad: grad * 2)
    with pytest.raises(AssertionError, match=r"1 difference\(s\):\n  gradient up.bias: off by 1"):
        parity.compare(off, whole, tiny.batch("mlp"))
    parity.compare(off, whole, tiny.batch("mlp"), grads=False)


def test_compare_notices_missing_and_misshapen_tensors(plain_grads):
    whole, off = add_noise(tiny.model("mlp")), add_noise(tiny.model("mlp"))
    off.up.bias.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"gradient up\.bias: missing in the split model"):
        parity.compare(off, whole, tiny.batch("mlp"))
    off = add_noise(tiny.model("mlp"))
    off.register_forward_hook(lambda module, args, output: output[:1])
    with pytest.raises(AssertionError, match="output output: off by inf"):
        parity.compare(off, whole, tiny.batch("mlp"), grads=False)
    off = add_noise(tiny.model("mlp"))
    off.register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(AssertionError, match="off by inf"):
        parity.compare(off, whole, tiny.batch("mlp"), grads=False)


def test_exact_keeps_float64():
    x = torch.ones(2, dtype=torch.float64)
    with parity.exact():
        assert x.float().dtype == x.to(torch.float32).dtype == torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
    assert x.float().dtype == torch.float32


def test_unknown_tiny_model():
    with pytest.raises(PlaitError, match="there are llama"):
        tiny.model("lama")


def test_mutation_restores_and_demands_a_failure():
    target = types.SimpleNamespace(value=1)

    def check():
        assert target.value == 1

    with mutation.must_fail(target, "value", 2):
        check()
    assert target.value == 1
    with pytest.raises(AssertionError, match=r"nothing noticed that .*\.value was broken"):
        with mutation.must_fail(target, "value", 2):
            pass
    with pytest.raises(ZeroDivisionError):  # not the failure of a check
        with mutation.must_fail(target, "value", 2):
            raise ZeroDivisionError
    assert target.value == 1
    model = tiny.model("mlp")
    with mutation.patched(model, "forward", lambda x: x):
        assert model.forward(3) == 3
    assert "forward" not in vars(model)


@pytest.mark.ranks(2)
def test_mutation_noticed_by_one_rank_is_noticed(rank):
    target = types.SimpleNamespace(value=1)
    with mutation.must_fail(target, "value", 2):
        assert rank == 0 or target.value == 1
    with pytest.raises(AssertionError, match="nothing noticed"):
        with mutation.must_fail(target, "value", 2):
            pass


@pytest.mark.ranks(2)
def test_annotations_are_checked_in_the_ranks(rank):
    assert typecheck.installed()
    assert rank_info() == environment.World(rank, 2, rank, launched=True)
    with pytest.raises(Exception, match="Type-check error") as caught:
        environment.world(3)
    assert type(caught.value).__module__.startswith("jaxtyping")
    assert "plait.run.environment" in sys.modules
