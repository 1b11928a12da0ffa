"""A training with `Accelerator` is that of one process over the same global batches."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import plait
from plait.proof.numbers import exact
from plait.testing import add_noise, mutation, tiny
from plait.train import GradientAccumulationPlugin, accumulation, gradients, loader, sources

STEPS = 2  # micro-steps for each optimizer step
GLOBAL = 4  # samples of a micro-step, over all data ranks
LENGTH = 7


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of which unequal parts are masked, one of them wholly."""
    made = []
    for number in range(count):
        one = {k: v[0] for k, v in tiny.batch("llama", size=1, length=LENGTH, seed=number).items()}
        one["labels"][: (number * 3) % LENGTH] = -100
        if number == 2:
            one["labels"][:] = -100
        made.append(one)
    return made


def one_process(
    model: nn.Module, data: list[Any], epochs: int, order: list[list[int]] | None = None
) -> tuple[list[float], list[float]]:
    """The same training without plait: losses and norms of each optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses, norms = [], []
    for epoch in range(epochs):
        index = order[epoch] if order else list(range(len(data)))
        for start in range(0, len(data), GLOBAL * STEPS):
            window = [data[i] for i in index[start : start + GLOBAL * STEPS]]
            batch = {name: torch.stack([x[name] for x in window]) for name in window[0]}
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms


def with_accelerator(
    accelerator: Any, model: nn.Module, data: list[Any], epochs: int, **loading: Any
) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    batches = DataLoader(data, batch_size=GLOBAL // accelerator.num_data_ranks, **loading)
    prepared = accelerator.prepare(optimizer, scheduler, batches, model)
    assert prepared[0] is optimizer and prepared[3] is model
    optimizer, scheduler, batches, model = prepared
    losses, norms = [], []
    for _ in range(epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.window_loss()))
                    norms.append(norm.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert scheduler.last_epoch == len(losses)
    return losses, norms


def check(sizes: dict[str, Any], count: int = 13, epochs: int = 2, name: str = "llama") -> None:
    """Assert that a layout trains as one process does."""
    data = samples(count)
    whole = add_noise(tiny.model(name)).train()
    split = add_noise(tiny.model(name)).train()
    config = plait.DistributedConfig(**sizes) if sizes else None
    accelerator = plait.Accelerator(config, gradient_accumulation_steps=STEPS)
    with exact():
        expected = one_process(whole, data, epochs)
        found = with_accelerator(accelerator, split, data, epochs)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-9, atol=0)
    state = plait.full_state_dict(split)
    for key, x in whole.state_dict().items():
        torch.testing.assert_close(state[key], x, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2}, {}], ids=str)
@pytest.mark.parametrize("count", [9, 13])
def test_weights_losses_and_norms_equal_one_process(sizes: dict[str, int], count: int) -> None:
    """The last window has one micro-batch, or two of which the last is not for every rank."""
    check(sizes, count)


@pytest.mark.ranks(3)
def test_three_ranks_that_split_every_tensor() -> None:
    check({"tp_size": 3})


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
    ],
    ids=str,
)
def test_four_ranks(sizes: dict[str, int]) -> None:
    check(sizes)


@pytest.mark.ranks(2)
def test_offloaded_parameters() -> None:
    check({"dp_shard_size": 2, "fsdp_cpu_offload": True}, epochs=1)


@pytest.mark.ranks(4)
def test_tied_weights() -> None:
    check({"dp_shard_size": 2, "tp_size": 2}, epochs=1, name="gemma3_text")


def test_one_process_without_a_launcher() -> None:
    check({})


MUTATIONS = {
    "micro-batches weigh alike": (accumulation.Window, "_weigh", lambda self, counted, turn: 0.5),
    "gradients are not divided": (accumulation, "divide_gradients", lambda models, total: None),
    "a rank without samples keeps its labels": (
        loader.contents,
        "without_labels",
        lambda batch: batch,
    ),
    "every rank gets the first rank's samples": (sources.IndexedSource, "__init__", None),
    "schedulers step in every micro-step": (
        gradients.Gradients,
        "_scheduler_steps",
        lambda self: True,
    ),
}


def first_for_all(self: Any, data: Any, places: Any, seed: int, split: bool = False) -> None:
    made = sources.IndexedSource.__new__(sources.IndexedSource)
    ORIGINAL(made, data, places, seed, split)
    self.__dict__.update(made.__dict__)
    self.sampler.rank = 0


ORIGINAL = sources.IndexedSource.__init__


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_comparison_notices(what: str) -> None:
    target, name, broken = MUTATIONS[what]
    with mutation.must_fail(target, name, broken or first_for_all):
        check({"dp_shard_size": 2}, epochs=1)


class Regression(nn.Module):
    """A module whose caller computes the loss, with no tokens to count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = tiny.Mlp(8, 12)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).squeeze(-1)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("count", [9, 10, 15])
def test_losses_of_the_callers_weigh_by_samples(count: int, world_size: int) -> None:
    """Tuples without labels: the last steps are incomplete, in each of three ways."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=draw, dtype=torch.float64)
    y = torch.randn(count, generator=draw, dtype=torch.float64)
    whole, split = Regression().double(), Regression().double()
    accelerator = plait.Accelerator(gradient_accumulation_steps=2)
    batches = DataLoader(list(zip(x, y, strict=True)), 8 // world_size)
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(split, optimizer, batches)
    losses = []
    for one, target in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(one), target))
            if accelerator.sync_gradients:
                losses.append(float(accelerator.window_loss()))
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number, start in enumerate(range(0, count, 16)):
        loss = nn.functional.mse_loss(whole(x[start : start + 16]), y[start : start + 16])
        expected.zero_grad()
        loss.backward()
        expected.step()
        assert abs(losses[number] - loss.item()) < 1e-12
    state = plait.full_state_dict(model)
    for name, param in whole.state_dict().items():
        torch.testing.assert_close(state[name], param, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.ranks(2)
def test_gradients_are_reduced_once_for_each_window(monkeypatch: Any) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    reduced = []
    original = groups.foreach_reduce

    def counting(*arguments: Any, **options: Any) -> Any:
        reduced.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(groups, "foreach_reduce", counting)
    grads = []
    for each in (False, True):
        reduced.clear()
        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each)
        accelerator = plait.Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(add_noise(tiny.model("llama")).train())
        counts = []
        for number in range(3):
            with accelerator.accumulate(model):
                batch = tiny.batch("llama", seed=number + 5 * accelerator.process_index)
                accelerator.backward(model(**batch).loss)
            counts.append(len(reduced))
        assert counts[2] > 0
        assert counts == ([counts[0], 2 * counts[0], 3 * counts[0]] if each else [0, 0, counts[2]])
        grads.append(plait.full_grads(model))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.ranks(2)
def test_what_a_loss_is_made_of_knows_its_tokens() -> None:
    """A loss times a number, or plus a term, is weighed by the tokens of the model's loss."""
    found = []
    for factor in (1.0, 2.0):
        accelerator = plait.Accelerator(gradient_accumulation_steps=2)
        model = add_noise(tiny.model("llama")).train()
        model, batches = accelerator.prepare(model, DataLoader(samples(7), 2))
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss if factor == 1.0 else loss * factor)
        found.append(plait.full_grads(model))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], 2 * grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=str)
def test_a_micro_batch_without_any_token(sizes: dict[str, int]) -> None:
    grads = []
    for empty in (False, True):
        accelerator = plait.Accelerator(
            plait.DistributedConfig(**sizes), gradient_accumulation_steps=3
        )
        model = accelerator.prepare(add_noise(tiny.model("llama")).train())
        for number in range(3):
            batch = tiny.batch("llama", seed=number)
            if number == 0 and empty:
                batch["labels"][:] = -100
            if number == 0 and not empty:
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
            if number == 1 and not empty:
                accelerator.gradient_accumulation_steps = 2
        grads.append(plait.full_grads(model))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=str)
@pytest.mark.parametrize("mixed", ["bf16", "fp16"])
def test_mixed_precision(sizes: dict[str, int], mixed: str) -> None:
    expected = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    accelerator = plait.Accelerator(plait.DistributedConfig(**sizes), mixed_precision=mixed)
    model = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if accelerator.scaler is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batch = tiny.batch("llama")
    logits = model(batch["input_ids"]).logits
    assert logits.dtype == torch.float32
    with accelerator.accumulate(model):
        output = model(**batch)
        accelerator.backward(output.loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
        again = accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        schedule.step()
    assert output.loss.dtype == torch.float32 and schedule.last_epoch == 1
    loss = expected(**batch).loss
    loss.backward()
    assert abs(float(loss) - float(output.loss)) < 0.03 * abs(float(loss))
    whole = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e6)
    assert norm.dtype == torch.float32 and type(norm) is torch.Tensor
    assert abs(norm - whole) < 0.05 * whole and norm == again
    grads = plait.full_grads(model)
    for name, param in expected.named_parameters():
        assert param.grad is not None
        gap = (grads[name] - param.grad).norm() / whole
        assert gap < 0.05, (name, gap)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"dp_shard_size": 2}, {"tp_size": 2}], ids=str)
def test_a_step_with_infinite_gradients_is_left_out(sizes: dict[str, int], rank: int) -> None:
    """Also where only one rank has one."""
    accelerator = plait.Accelerator(plait.DistributedConfig(**sizes), mixed_precision="fp16")
    model = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    before = plait.full_state_dict(model)
    scale = accelerator.scaler.get_scale()
    accelerator.backward(model(**tiny.batch("llama")).loss)
    if rank == 0:
        param = next(p for n, p in model.named_parameters() if "q_proj" in n)
        param.grad.to_local().view(-1)[:1] = float("inf")
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped and schedule.last_epoch == 0
    assert accelerator.scaler.get_scale() == scale / 2
    after = plait.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    optimizer.zero_grad()
    accelerator.scaler.update(1024.0)
    accelerator.backward(model(**tiny.batch("llama")).loss)
    optimizer.step()
    schedule.step()
    assert not accelerator.optimizer_step_was_skipped and schedule.last_epoch == 1


@pytest.mark.ranks(2)
def test_two_optimizers_share_a_scaler() -> None:
    """Clipping one model leaves the other's gradients, which come later, alone."""
    accelerator = plait.Accelerator(mixed_precision="fp16")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)
    made = [Regression().float(), Regression().float()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in made]
    models = accelerator.prepare(*made)
    optimizers = accelerator.prepare(*optimizers)
    expected = [Regression().float(), Regression().float()]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
        for model in expected:
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
        for model, whole in zip(models, expected, strict=True):
            state = plait.full_state_dict(model)
            for name, param in whole.state_dict().items():
                torch.testing.assert_close(state[name], param, rtol=2e-2, atol=2e-3, msg=name)
        assert step == 0 or accelerator.scaler.get_scale() > 512


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_a_classifier_whose_last_step_is_not_for_all(kind: str) -> None:
    from transformers import LlamaForSequenceClassification

    def made() -> nn.Module:
        torch.manual_seed(0)
        labels = 3 if kind == "classes" else 1
        config = tiny.config("llama", num_labels=labels, use_cache=False)
        return add_noise(LlamaForSequenceClassification(config).double()).train()

    data = []
    for number in range(5):
        ids = tiny.batch("llama", size=1, length=6, seed=number)["input_ids"][0]
        label = torch.tensor(number % 3 if kind == "classes" else number / 3.0)
        data.append(
            {"input_ids": ids, "labels": label.double() if label.dtype.is_floating_point else label}
        )
    whole, split = made(), made()
    accelerator = plait.Accelerator(gradient_accumulation_steps=2)
    model, batches = accelerator.prepare(split, DataLoader(data, 2))
    with exact():
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
        batch = {name: torch.stack([x[name] for x in data]) for name in data[0]}
        loss = whole(**batch).loss
        loss.backward()
    assert abs(float(accelerator.window_loss()) - loss.item()) < 1e-12
    grads = plait.full_grads(model)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-8, atol=1e-11, msg=name)
