"""A training with `Accelerator` is that of one process over the same global batches."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import plait
from plait.proof.numbers import exact
from plait.testing import add_noise, tiny

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


def check(sizes: dict[str, int], count: int = 9, epochs: int = 2) -> None:
    """Assert that a layout trains as one process does."""
    data = samples(count)
    whole = add_noise(tiny.model("llama")).train()
    split = add_noise(tiny.model("llama")).train()
    config = plait.DistributedConfig(**sizes) if sizes else None
    accelerator = plait.Accelerator(config, gradient_accumulation_steps=STEPS)
    with exact():
        expected = one_process(whole, data, epochs)
        found = with_accelerator(accelerator, split, data, epochs)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-9, atol=0)
    state = plait.full_state_dict(split)
    for name, x in whole.state_dict().items():
        torch.testing.assert_close(state[name], x, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2}, {}], ids=str)
def test_weights_losses_and_norms_equal_one_process(sizes: dict[str, int]) -> None:
    check(sizes)


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


def test_one_process_without_a_launcher() -> None:
    check({})
