"""Windows of micro-steps that are left half way, or hold more than one loss."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import PlaitError
from plait.loss.asking import is_made_of
from plait.testing import add_noise, tiny
from plait.train import Window

FSDP = plait.DistributedConfig(dp_shard_size=2)
BOTH = [{"dp_shard_size": 2}, {"tp_size": 2}]


class Stop(Exception):
    pass


def prepared(sizes: dict[str, int], steps: int, **more: Any) -> tuple[Any, Any, Any]:
    accelerator = plait.Accelerator(
        plait.DistributedConfig(**sizes), gradient_accumulation_steps=steps, **more
    )
    model = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer))


def loss(model: Any, seed: int) -> torch.Tensor:
    found: torch.Tensor = model(**tiny.batch("llama", seed=seed)).loss
    return found


def window_grads(accelerator: Any, model: Any, seeds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    for seed in seeds:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, seed))
    return plait.full_grads(model)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys() and len(found) > 3
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
@pytest.mark.parametrize("how", ["exception before", "exception after", "load", "reset"])
def test_a_window_that_is_given_up_leaves_nothing(
    sizes: dict[str, int], how: str, tmp_path: Any
) -> None:
    accelerator, model, optimizer = prepared(sizes, 3)
    expected = window_grads(accelerator, model, (1, 2, 3))
    optimizer.zero_grad()
    if how == "load":
        accelerator.save_state(tmp_path / "states")
    with accelerator.accumulate(model):
        accelerator.backward(loss(model, 7))
    if how.startswith("exception"):
        with pytest.raises(Stop), accelerator.accumulate(model):
            if how == "exception after":
                accelerator.backward(loss(model, 8))
            raise Stop
    elif how == "load":
        accelerator.load_state(tmp_path / "states")
    else:
        accelerator.window.reset()
    assert same(window_grads(accelerator, model, (1, 2, 3)), expected)


@pytest.mark.ranks(2)
def test_a_window_goes_on_after_a_break_and_is_not_cleared() -> None:
    accelerator, model, optimizer = prepared({"dp_shard_size": 2}, 3)
    expected = window_grads(accelerator, model, (1, 2, 3))
    optimizer.zero_grad()
    for seed in (1, 9):
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, seed))
            break
    optimizer.zero_grad()  # in the middle of a window: as accelerate, nothing
    assert same(window_grads(accelerator, model, (2, 3)), expected)


@pytest.mark.ranks(2)
def test_a_pass_outside_of_a_window_reduces() -> None:
    accelerator, model, _ = prepared({"dp_shard_size": 2}, 2)
    with pytest.raises(Stop), accelerator.accumulate(model):
        raise Stop
    loss(model, 1).backward()
    found = plait.full_grads(model)
    model.zero_grad()
    alone = plait.full_grads(model)
    assert not alone
    loss(model, 1).backward()
    assert same(plait.full_grads(model), found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [True, False])
def test_what_the_user_set_holds_afterwards(before: bool) -> None:
    accelerator, model, _ = prepared({"dp_shard_size": 2}, 1)
    model.set_requires_gradient_sync(before)
    with accelerator.accumulate(model):
        accelerator.backward(loss(model, 1))
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    loss(model, 1).backward()
    assert all((param.grad is not None) == before for param in model.parameters())
    with accelerator.no_sync(model):
        loss(model, 2).backward()
    model.set_requires_gradient_sync(True)


class TwoLosses(nn.Module):
    """A loss of tokens and one of sentences, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.score = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, next_sentence_label: Any) -> Any:
        hidden = self.layer(x).tanh()
        tokens = F.cross_entropy(hidden.flatten(0, 1), labels.flatten())
        return tokens + F.cross_entropy(self.score(hidden[:, 0]), next_sentence_label)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
def test_several_losses_are_no_window(sizes: dict[str, int]) -> None:
    config = plait.DistributedConfig(tp_plan={"layer": "colwise_gather_output"}, **sizes)
    accelerator = plait.Accelerator(config, gradient_accumulation_steps=2)
    model = accelerator.prepare(TwoLosses())
    x, labels = torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.long)
    with (
        pytest.raises(PlaitError, match=r"means over \d+ and \d+ tokens"),
        accelerator.accumulate(model),
    ):
        accelerator.backward(model(x, labels, torch.ones(2, dtype=torch.long)))
    accelerator.gradient_accumulation_steps = 1
    with accelerator.accumulate(model):
        accelerator.backward(model(x, labels, torch.ones(2, dtype=torch.long)))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), labels, weight=torch.tensor([1.0, 2.0, 4.0, 8.0]))


@pytest.mark.ranks(2)
def test_class_weights_weigh_the_micro_steps() -> None:
    torch.manual_seed(0)
    model, x = Weighted(), torch.randn(8, 6)
    labels = torch.tensor([0, 0, 3, 1, 2, 3, 3, 0])
    expected = torch.autograd.grad(model(x, labels), list(model.parameters()))
    accelerator = plait.Accelerator(FSDP, gradient_accumulation_steps=2)
    split, rank = accelerator.prepare(model), torch.distributed.get_rank()
    for half in range(2):
        mine = slice(4 * half + 2 * rank, 4 * half + 2 * rank + 2)
        with accelerator.accumulate(split):
            accelerator.backward(split(x[mine], labels[mine]))
    found = plait.full_grads(split)
    for grad, wanted in zip(found.values(), expected, strict=True):
        assert torch.allclose(grad, wanted, atol=1e-6)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_numbers_of_micro_steps(steps: Any) -> None:
    with pytest.raises(PlaitError, match="a whole number of micro-steps"):
        Window(steps)
    with pytest.raises(PlaitError, match="a whole number of micro-steps"):
        plait.Accelerator(gradient_accumulation_steps=steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_fused_step_that_is_left_out_is_noticed(kind: str, rank: int) -> None:
    accelerator = plait.Accelerator(FSDP, mixed_precision="fp16")
    model = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    before = plait.full_state_dict(model)
    accelerator.backward(loss(model, 1))
    if rank == 0:
        param = next(p for n, p in model.named_parameters() if "q_proj" in n)
        param.grad.to_local().view(-1)[:1] = float("inf")
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped and schedule.last_epoch == 0
    assert same(plait.full_state_dict(model), before)
    with pytest.raises(PlaitError, match="they would not be scaled"):
        optimizer.step(lambda: 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
def test_closures(sizes: dict[str, int]) -> None:
    accelerator, model, optimizer = prepared(sizes, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model, 1)
        accelerator.backward(found)
        return found

    first = optimizer.step(closure)
    second = optimizer.step(closure=closure)
    optimizer.step(closure=None)
    assert second < first


class Noisy(torch.utils.data.Dataset[Any]):
    """Its samples are drawn in the process that trains, and depend on all draws before."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index


def noisy_run(folder: Any, sizes: dict[str, int], start: bool) -> list[torch.Tensor]:
    accelerator = plait.Accelerator(plait.DistributedConfig(**sizes), seed=3)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not start:
        accelerator.load_state(folder)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if start and number == 1:
            accelerator.save_state(folder)
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"dp_shard_size": 2}, {"dp_replicate_size": 2}], ids=str)
def test_samples_drawn_at_random_are_the_same_after_a_resumption(
    sizes: dict[str, int], tmp_path: Any
) -> None:
    unbroken = noisy_run(tmp_path, sizes, start=True)
    torch.manual_seed(99)
    again = noisy_run(tmp_path, sizes, start=False)
    assert len(unbroken) == 6 and len(again) == 4
    for mine, expected in zip(again, unbroken[2:], strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.ranks(2)
def test_a_model_does_not_keep_the_graph_of_its_last_loss() -> None:
    """What the forward saved goes with its output; and the model can be copied."""
    model = plait.parallelize(tiny.model("llama"), plait.DistributedConfig(tp_size=2))
    saved: list[Any] = []

    def pack(x: torch.Tensor) -> Any:
        box = Box(x.detach())  # a box with an output's graph would hold itself
        saved.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.x):
        loss = model(**tiny.batch("llama")).loss
    copied = copy.deepcopy(model)
    assert is_made_of(loss * 2, model) and not is_made_of(loss * 2, copied)
    del loss
    gc.collect()
    assert saved and not any(box() is not None for box in saved)


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
