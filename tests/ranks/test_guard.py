"""The consistency guard: what differs between the ranks is named, on all of them, at once."""

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait import comm
from plait.consistency import fingerprints, guarding
from plait.errors import LayoutError, RankError
from plait.state import state_of
from plait.testing import add_noise, mutation, parity, tiny

LIMIT_S = 5.0


def rank() -> int:
    return torch.distributed.get_rank()


def world() -> int:
    return torch.distributed.get_world_size()


def split(name: str = "llama", **overrides: Any) -> Any:
    plan = tiny.MLP_PLAN if name == "mlp" else None
    return plait.parallelize(add_noise(tiny.model(name, **overrides)), tp_plan=plan)


@contextmanager
def named(*texts: str) -> Iterator[None]:
    """Expect a RankError with these texts on every rank, soon; the ranks go on together."""
    begin = time.perf_counter()
    with pytest.raises(RankError) as caught:
        yield
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    assert time.perf_counter() - begin < LIMIT_S
    torch.distributed.barrier()


def odd(text: str) -> str:
    """With three ranks or more the one that differs is named; of two, either may be wrong."""
    return f"so rank 1 differs from the {world() - 1} others" if world() > 2 else text


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llava", "mlp"])
def test_nothing_is_found_where_nothing_differs(name: str) -> None:
    model, batch = split(name), tiny.batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with plait.guard(model, weights_every=2) as guard:
        for _ in range(3):
            out = model(**batch)
            (out if name == "mlp" else out.loss).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        guard.check_weights()
        assert (guard.forwards, guard.steps) == (3, 3)
        if name != "mlp":
            inputs = {k: v[:1] for k, v in batch.items() if k != "labels"}
            model.generate(**inputs, max_new_tokens=4, do_sample=True)
            assert guard.forwards >= 6
    assert not guard.is_on and not model._forward_pre_hooks
    model(**batch)


INPUTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "value": (lambda b: b["input_ids"].__setitem__((1, 3), 9), "input_ids differs"),
    "shape": (lambda b: b.update(labels=b["labels"][:, :5]), "labels differs"),
    "absent": (lambda b: b.pop("labels"), "labels differs"),
    "mask": (
        lambda b: b.update(attention_mask=torch.ones(2, 7, dtype=torch.long)),
        "attention_mask differs",
    ),
    "dtype": (lambda b: b.update(input_ids=b["input_ids"].int()), "int32 (2, 7)"),
    "keyword": (lambda b: b.update(use_cache=False), "use_cache differs"),
    "embeds": (
        lambda b: b.update(inputs_embeds=torch.ones(2, 7, 96), input_ids=None),
        "input_ids differs",
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", INPUTS)
def test_different_arguments(kind: str) -> None:
    change, text = INPUTS[kind]
    model, batch = split(), tiny.batch("llama")
    guard = plait.guard(model)
    model(**batch)
    mine = dict(batch)
    if rank() == 1:
        mine = {name: x.clone() for name, x in batch.items()}
        change(mine)
    with named(text, "forward 2", "test_guard.py", "rank 0: ", "rank 1: ", odd("rank 1: ")):
        model(**mine)
    model(**batch)
    guard.off()


@pytest.mark.ranks(2, 3)
def test_different_modes() -> None:
    model, batch = split(), tiny.batch("llama")
    with plait.guard(model):
        model.train(rank() == 1)
        with named("train() differs"):
            model(**batch)
        model.eval()
        with torch.set_grad_enabled(rank() != 1), named("gradients differs", odd("not recorded")):
            model(**batch)


@pytest.mark.ranks(2, 3)
def test_a_forward_more_on_one_rank() -> None:
    """Of equal shapes and values: only the numbers can tell."""
    model, batch = split(), tiny.batch("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = plait.guard(model)
    with torch.no_grad():
        model(**batch)
    loss = model(**batch).loss
    with named("rank 1", "forward 3" if rank() == 1 else "all_reduce"):
        if rank() == 1:
            model(**batch)  # meets the others where they come next
        loss.backward()
        optimizer.step()
    guard._remove()

    guard = plait.guard(model)
    with torch.no_grad():
        model(**batch)
        with named("not at the same point", "forward 2", "the end of the guard"):
            if rank() == 1:
                model(**batch)
            guard.off()
    guard._remove()


@pytest.mark.ranks(2)
def test_a_forward_more_is_noticed_at_the_optimizer_step() -> None:
    """Where only every second forward is looked at, the numbers tell at the step."""
    model, batch = split(), tiny.batch("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = plait.guard(model, every=2)
    model(**batch).loss.backward()
    guard.forwards += rank()  # a forward of which nobody heard
    with named("rank 0 is at optimizer step 1, after 1 forward", "rank 1", "after 2 forward"):
        optimizer.step()
    guard._remove()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    model, batch = split(), tiny.batch("llama")
    guard = plait.guard(model, timeout_s=0.5)
    if rank() == 1:
        time.sleep(1.0)
        with pytest.raises(RankError):
            model(**batch)
    else:
        begin = time.perf_counter()
        with pytest.raises(RankError, match="The guard of LlamaForCausalLM: forward 1"):
            model(**batch)
        assert time.perf_counter() - begin < LIMIT_S
    guard._remove()


@pytest.mark.ranks(2, 3)
def test_whole_weights_and_gradients() -> None:
    model, batch = split(), tiny.batch("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = plait.guard(model, weights_every=1)
    norm = model.model.layers[1].input_layernorm.weight
    with torch.no_grad():
        if rank() == 1:
            norm.to_local()[5] += 1e-12
    with named("parameter model.layers.1.input_layernorm.weight", odd("float64 (96,) with the")):
        model(**batch)
    with named("parameter model.layers.1.input_layernorm.weight", "check_weights()"):
        guard.check_weights()
    if rank() == 1:
        with torch.no_grad():
            norm.to_local()[5] -= 1e-12
    plait_state = plait.full_state_dict(model)
    model.load_state_dict(plait_state)
    value = comm.broadcast(norm.to_local().detach(), state_of(model).tp_mesh)
    norm.to_local().detach().copy_(value)

    model(**batch).loss.backward()
    guard.check_gradients()
    if rank() == 1:
        norm.grad.to_local()[0] *= 1.001
    with named("gradient of model.layers.1.input_layernorm.weight", "check_gradients()"):
        guard.check_gradients()
    with named("gradient of model.layers.1.input_layernorm.weight", "optimizer step 1"):
        optimizer.step()
    if rank() == 1:
        norm.grad = None
    with named("gradient of model.layers.1.input_layernorm.weight", "absent"):
        optimizer.step()
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    if rank() == 1:
        other.step()  # of another model: nobody is asked
    guard._remove()


@pytest.mark.ranks(2, 3)
def test_a_tolerance_for_rounding() -> None:
    model, batch = split(), tiny.batch("llama")
    guard = plait.guard(model, tolerance=1e-6)
    grad = None
    model(**batch).loss.backward()
    grad = model.model.norm.weight.grad.to_local()
    before = grad.clone()
    grad *= 1 + 1e-9 * rank()
    guard.check_gradients()
    grad.copy_(before)
    if rank() == 1:
        grad[3] *= 1.1
    with named("gradient of model.norm.weight"):
        guard.check_gradients()
    guard._remove()


@pytest.mark.ranks(2, 3)
def test_a_missing_all_reduce_is_found_by_the_gradients() -> None:
    """A norm on split activations without a style of its own: its gradient is a term of a sum."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(96, 48), nn.Linear(48, 96)
            self.scale = nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            return self.down(hidden * self.scale(torch.ones(1)))

    plan = {"up": "colwise", "down": "rowwise"}
    torch.manual_seed(0)
    model = plait.parallelize(Net(), tp_plan=plan)
    with plait.guard(model) as guard:
        model(torch.randn(3, 96)).square().sum().backward()
        with named("gradient of scale.weight", "replicated_with_grad_allreduce"):
            guard.check_gradients()


@pytest.mark.ranks(2)
def test_sampled_tokens() -> None:
    model = split()
    ids = tiny.batch("llama", size=1)["input_ids"]
    step = type(model)._sample

    def drifting(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if rank() == 1:
            input_ids = input_ids.clone()
            input_ids[0, -1] += 1
        return step(self, input_ids, *args, **kwargs)

    with plait.guard(model) as guard, mutation.patched(type(model), "_sample", drifting):
        with named("input_ids differs", "of generate()"):
            model.generate(ids, max_new_tokens=3, do_sample=True)
        assert guard.is_on


@pytest.mark.ranks(2, 3)
def test_new_modules_are_adopted_before_they_are_compared() -> None:
    model = split()
    ids = tiny.batch("llama")["input_ids"]
    torch.manual_seed(rank())
    with plait.guard(model, weights_every=1):
        model.lm_head = nn.Linear(96, 7).double()
        model(ids)
        assert plait.held_fraction(model) < 1


@pytest.mark.ranks(2)
def test_the_switch_in_the_config_and_a_second_guard() -> None:
    for wrong in (-1, 0, "yes", 1.5):
        with pytest.raises(LayoutError, match="consistency_guard"):
            plait.DistributedConfig(tp_size=2, consistency_guard=wrong)
    config = plait.DistributedConfig(tp_size=2, consistency_guard=2)
    assert plait.DistributedConfig.from_dict(config.to_dict()) == config
    model = plait.parallelize(tiny.model("llama"), config)
    first = model.__dict__["_plait_guard"]
    assert first.every == 2 and first.is_on
    batch = tiny.batch("llama")
    with plait.guard(model) as second:
        assert not first.is_on
        model(**batch)
    assert (first.forwards, second.forwards) == (0, 1)
    parity.compare(model, tiny.model("llama"), batch)


@pytest.mark.ranks(2)
def test_copies_are_not_guarded_and_models_are_freed() -> None:
    model = plait.parallelize(
        tiny.model("llama"), plait.DistributedConfig(tp_size=2, consistency_guard=True)
    )
    copied = copy.deepcopy(model)
    if rank() == 0:
        copied.lm_head.weight  # noqa: B018
    copied(torch.ones(1, 3, dtype=torch.long))
    assert model.__dict__["_plait_guard"].forwards == 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.ranks(2, 3)
def test_an_error_of_the_users_ends_the_guard_on_all_ranks() -> None:
    model, batch = split(), tiny.batch("llama")
    with pytest.raises(KeyError if rank() == 1 else RankError, match="mine"):
        with plait.guard(model):
            model(**batch)
            if rank() == 1:
                raise KeyError("mine")
            model(**batch)
    assert not model._forward_pre_hooks
    torch.distributed.barrier()
    model(**batch)


def test_a_module_that_is_not_split() -> None:
    model = tiny.model("mlp")
    with plait.guard(model) as guard:
        model(**tiny.batch("mlp"))
        guard.check_weights()
    assert not guard.is_on


@pytest.mark.ranks(2)
def test_the_checksum_is_what_finds_it() -> None:
    def found() -> None:
        model, batch = split(), tiny.batch("llama")
        guard = plait.guard(model)
        batch["input_ids"][0, 0] += rank()
        try:
            with named("input_ids"), torch.no_grad():
                model(**batch)
        finally:
            guard._remove()

    found()
    with mutation.must_fail(fingerprints, "checksum", lambda x: "", raises=BaseException):
        found()


@pytest.mark.ranks(2)
def test_one_message_for_a_forward() -> None:
    model, batch = split(), tiny.batch("llama")
    told: list[Any] = []
    exchange = comm.exchange

    def counted(obj: Any, mesh: Any) -> list[Any]:
        told.append(obj)
        return exchange(obj, mesh)

    with mutation.patched(guarding.comm, "exchange", counted):
        with plait.guard(model, every=2, weights_every=0):
            for _ in range(4):
                model(**batch)
    assert len(told) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_checksums(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert fingerprints.checksum(x) == fingerprints.checksum(x.clone())
    assert fingerprints.checksum(x.t()) == fingerprints.checksum(x.t().contiguous())
    y = x.clone()
    y[0, 0] = 1
    assert fingerprints.checksum(x) != fingerprints.checksum(y)
    assert fingerprints.checksum(x[:0]) == ""


def test_the_sum_of_bits_that_a_device_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = fingerprints.weighted_bits
    x = torch.randn(31, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool):
        y = (x * 50).to(dtype)
        z = y.clone()
        z[3], z[4] = y[4], ~y[3] if dtype == torch.bool else y[3] + 1
        assert weighted(y) == weighted(y.clone()) != weighted(z), dtype
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    assert weighted(x) != weighted(swapped), "places count"
    whole = weighted(x)
    monkeypatch.setattr(fingerprints, "_CHUNK", 7)
    assert weighted(x) == whole
