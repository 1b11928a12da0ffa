"""What `Accelerator` prepares, asks the ranks, gathers, saves and loads."""

import contextlib
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import plait
from plait.errors import CheckpointError, LayoutError, PlaitError
from plait.proof.numbers import exact
from plait.testing import add_noise, mutation, tiny
from plait.train import DataLoaderConfiguration, preparing

TP = plait.DistributedConfig(tp_size=2)
FSDP = plait.DistributedConfig(dp_shard_size=2)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for number in range(count):
        one = {k: v[0] for k, v in tiny.batch("llama", size=1, length=6, seed=number).items()}
        one["labels"][: number % 5] = -100
        made.append(one)
    return made


# -- prepare ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", [TP, FSDP], ids=["tp", "fsdp"])
@pytest.mark.parametrize("order", ["before", "after", "together", "apart"])
def test_optimizers_follow_the_parameters(config: Any, order: str) -> None:
    accelerator = plait.Accelerator(config)
    model = add_noise(tiny.model("llama", tie_word_embeddings=True)).train()
    if order == "after":
        assert accelerator.prepare(model) is model
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "lr": 0.1}, {"params": rest, "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if order == "apart":
        accelerator.prepare(optimizer)
    found = accelerator.prepare(optimizer, model, "anything", early)
    assert found[0] is optimizer and found[1] is model and found[2] == "anything"
    late = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(decay), len(rest)]
    assert optimizer.param_groups[0]["fused"]
    before = plait.full_state_dict(model)
    accelerator.backward(model(**tiny.batch("llama")).loss)
    optimizer.step()
    found[3].step()
    late.step()
    assert early.last_epoch == 1 and late.scheduler.last_epoch == 1
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05)
    after = plait.full_state_dict(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.ranks(2)
def test_what_cannot_be_prepared(monkeypatch: Any) -> None:
    accelerator = plait.Accelerator(TP)
    model = tiny.model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    model(**tiny.batch("mlp")).sum().backward()
    optimizer.step()
    config = plait.DistributedConfig(tp_size=2, tp_plan=tiny.MLP_PLAN)
    accelerator = plait.Accelerator(config)
    with pytest.raises(PlaitError, match="SGD has a state for its parameters as they are now"):
        accelerator.prepare(model, optimizer)
    with pytest.raises(LayoutError, match="meta device"), torch.device("meta"):
        accelerator.prepare(nn.Linear(2, 2))
    model = accelerator.prepare(tiny.model("mlp"))
    with pytest.raises(LayoutError, match="was split over tp 2, the Accelerator has dp_shard 2"):
        plait.Accelerator(FSDP).prepare(model)
    stranger = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(PlaitError, match="2 of its parameters belong to no prepared model"):
        stranger.step()
    with pytest.raises(LayoutError, match="tp 4 alone, but WORLD_SIZE is 2"):
        plait.Accelerator(plait.DistributedConfig(tp_size=4))
    with pytest.raises(LayoutError, match="is none of plait's configs"):
        plait.Accelerator({"tp_size": 2})  # type: ignore[arg-type]
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert plait.Accelerator().num_data_ranks == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert plait.Accelerator().num_data_ranks == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", [TP, None], ids=["tp", "dp"])
def test_weights_that_differ_become_those_of_the_first_rank(config: Any, rank: int) -> None:
    accelerator = plait.Accelerator(config)
    expected = tiny.model("llama", seed=5, tie_word_embeddings=True).state_dict()

    def compare() -> None:
        model = tiny.model("llama", seed=5 + rank, tie_word_embeddings=True)
        state = plait.full_state_dict(accelerator.prepare(model))
        assert all(torch.equal(state[name], expected[name]) for name in expected)

    compare()
    with pytest.raises(LayoutError, match="rank 1 has float32"):
        accelerator.prepare(nn.Linear(3, 4 + rank))
    with mutation.must_fail(preparing, "equalise", lambda model, places: []):
        compare()


@pytest.mark.ranks(2)
def test_from_pretrained_and_generate(tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        tiny.model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    torch.distributed.barrier()
    accelerator = plait.Accelerator(TP, mixed_precision="bf16")
    loaded = plait.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=TP)
    model = accelerator.prepare(loaded)
    assert model is loaded and accelerator.unwrap_model(model) is loaded
    assert accelerator.prepare(model) is loaded and len(accelerator.models) == 1
    ids = tiny.batch("llama")["input_ids"]
    told = accelerator.places.exchange(model.generate(ids, max_new_tokens=3).tolist())
    assert told[0] == told[1]
    accelerator.save_model(model, tmp_path / "again")
    again = plait.AutoModelForCausalLM.from_pretrained(tmp_path / "again", distributed_config=TP)
    first, second = plait.full_state_dict(model), plait.full_state_dict(again)
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_numbers_of_all_data_ranks_count_each_group_once(rank: int) -> None:
    accelerator = plait.Accelerator(plait.DistributedConfig(dp_shard_size=2, tp_size=2))
    place = accelerator.data_parallel_rank
    assert (place, accelerator.tensor_parallel_rank) == (rank // 2, rank % 2)
    assert accelerator.num_processes == 4 and accelerator.num_data_ranks == 2
    mesh = accelerator.torch_device_mesh
    assert mesh is not None and mesh["tp"].size() == 2
    x = torch.full((1 + place, 2), float(place))
    assert accelerator.gather(x).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    nested = accelerator.gather({"a": [torch.tensor(place)], "b": 3})
    assert nested["a"][0].tolist() == [0, 1] and nested["b"] == 3
    assert accelerator.gather(torch.tensor([place == 1])).tolist() == [False, True]
    assert accelerator.reduce(torch.tensor(place + 1.0)).item() == 3
    assert accelerator.reduce([torch.tensor(place + 1)], "mean")[0].item() == 1.5
    assert accelerator.reduce(torch.tensor(1.0), "none", scale=4.0).item() == 4
    with pytest.raises(PlaitError, match="reduction='max'"):
        accelerator.reduce(x, "max")
    padded = accelerator.pad_across_processes(torch.ones(1, 2 + place), dim=1, pad_index=-1)
    assert padded.tolist() == [[1, 1, 1 if place else -1]]
    assert accelerator.gather_object([place, "x"]) == [0, "x", 1, "x"]
    with accelerator.split_between_processes(list(range(5))) as part:
        assert part == ([0, 1, 2] if place == 0 else [3, 4])
    with accelerator.split_between_processes({"a": torch.arange(5)}, apply_padding=True) as part:
        assert part["a"].tolist() == ([0, 1, 2] if place == 0 else [3, 4, 4])


@pytest.mark.ranks(2)
def test_metrics_have_every_sample_once() -> None:
    accelerator = plait.Accelerator()
    for count, size in itertools.product((1, 5, 6, 7, 8), (1, 2, 3)):
        seen, objects, losses = [], [], 0
        batches = accelerator.prepare(DataLoader(torch.arange(count), size))  # type: ignore[arg-type]
        for batch in batches:
            seen += accelerator.gather_for_metrics((batch, batch * 2))[0].tolist()
            objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
            losses += len(accelerator.gather_for_metrics(batch.float().mean()))
        assert seen == objects == list(range(count))
        assert losses == -(-count // size)
        assert accelerator.gather_for_metrics(torch.ones(1)).tolist() == [1, 1], "after the loop"


@pytest.mark.ranks(2)
def test_what_only_some_processes_do(rank: int, tmp_path: Path) -> None:
    accelerator = plait.Accelerator(TP, log_with="jsonl", project_dir=str(tmp_path))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("hello")
    assert printed.getvalue() == ("hello\n" if rank == 0 else "")
    assert accelerator.on_main_process(lambda: 1)() == (1 if rank == 0 else None)
    assert accelerator.on_last_process(lambda: 1)() == (1 if rank == 1 else None)
    assert accelerator.on_process(process_index=1)(lambda: 1)() == (1 if rank == 1 else None)
    file = tmp_path / "first"
    with accelerator.main_process_first():
        assert file.exists() == (rank == 1)
        file.touch()
    assert not accelerator.check_trigger()
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    accelerator.get_tracker("jsonl").log({"more": 1})
    accelerator.end_training()
    accelerator.wait_for_everyone()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and '"loss": 0.5' in lines[0]
    with pytest.raises(ValueError, match="no"), accelerator.main_process_first():
        raise ValueError("no")


def test_one_process_needs_nothing(tmp_path: Path) -> None:
    accelerator = plait.Accelerator(project_dir=tmp_path, mixed_precision="no")
    assert accelerator.is_main_process and accelerator.is_local_main_process
    assert accelerator.num_processes == accelerator.num_data_ranks == 1
    assert accelerator.torch_device_mesh is None and accelerator.process_index == 0
    accelerator.wait_for_everyone()
    with accelerator.main_process_first(), accelerator.autocast():
        x = torch.arange(3.0)
    assert accelerator.gather(x).equal(x) and accelerator.reduce(x, "mean").equal(x)
    assert accelerator.gather_object("a") == ["a"] and not accelerator.check_trigger()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = accelerator.prepare(model, optimizer)
    assert found[0] is model and found[1] is optimizer
    accelerator.save_model(model, tmp_path / "model")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored["weight"].equal(model.weight)
    assert accelerator.get_state_dict(model)["bias"].equal(model.bias)
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state()
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state().step >= 0 and model.weight.abs().sum() > 0
    assert accelerator.free_memory(model, optimizer) == [None, None] and not accelerator.models
    with pytest.raises(PlaitError, match="no model was prepared"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="no project_dir"):
        plait.Accelerator().save_state()
    with pytest.raises(PlaitError, match="has no state_dict"):
        accelerator.register_for_checkpointing(object())


def test_gradients_are_not_cleared_within_a_window() -> None:
    accelerator = plait.Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    start = model.weight.detach().clone()
    for value in (1.0, 3.0, 5.0):
        with accelerator.accumulate(model):
            optimizer.zero_grad()  # at the start, where it would throw the first half away
            accelerator.backward(model(torch.full((1, 2), value)).sum())
            optimizer.step()
            if value == 3.0:
                expected = start - 2.0
                assert torch.allclose(model.weight.detach(), expected)
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[5.0, 5.0]]


def test_settings() -> None:
    from accelerate import DataLoaderConfiguration as Theirs

    with pytest.raises(PlaitError, match="even_batches=False"):
        plait.Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    with pytest.raises(PlaitError, match="dispatch_batches=True is not known here"):
        plait.Accelerator(dataloader_config=Theirs(dispatch_batches=True))
    with pytest.raises(PlaitError, match="split_batches is False, and True in dataloader_config"):
        plait.Accelerator(split_batches=False, dataloader_config=Theirs(split_batches=True))
    made = plait.Accelerator(
        dataloader_config=Theirs(split_batches=True, use_seedable_sampler=True)
    )
    loader = made.prepare(DataLoader(range(4), 2))  # type: ignore[arg-type]
    assert loader.total_batch_size == 2 and made.prepare(loader) is loader
    with pytest.raises(PlaitError, match="for fsdp_plugin: plait"):
        plait.Accelerator(fsdp_plugin="x", cpu=False)
    with pytest.raises(PlaitError, match="it is none of 'no', 'bf16', 'fp16'"):
        plait.Accelerator(mixed_precision="fp4")


# -- states ----------------------------------------------------------------------------------------


class Counter:
    """Something of the user's that is part of the state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Training:
    """A training that can be stopped and gone on with, over any layout."""

    def __init__(self, config: Any, workers: int = 0) -> None:
        self.accelerator = plait.Accelerator(config, gradient_accumulation_steps=2, seed=11)
        self.model = add_noise(tiny.model("llama")).train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        size = 4 // self.accelerator.num_data_ranks
        batches = DataLoader(sentences(17), size, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
        self.model, self.optimizer, self.schedule, self.batches = self.accelerator.prepare(
            self.model, optimizer, schedule, batches
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.losses: list[float] = []

    def run(self, epochs: int, save_at: int = -1, directory: Path | None = None) -> list[float]:
        accelerator, model = self.accelerator, self.model
        while self.batches.epoch < epochs:
            for batch in self.batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    self.losses.append(loss.item())
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.counter.count += 1
                if self.counter.count == save_at:
                    accelerator.save_state(directory, extra={"losses": len(self.losses)})
                    return self.losses
        return self.losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("save_at", [2, 5, 7])
def test_resume_in_the_middle_of_an_epoch_over_another_layout(save_at: int, tmp_path: Path) -> None:
    with exact():
        unbroken = Training(FSDP).run(2)
        assert len(unbroken) == 10
        first = Training(TP)
        first.run(2, save_at, tmp_path)
        second = Training(FSDP)
        loaded = second.accelerator.load_state(tmp_path)
        assert second.counter.count == save_at and loaded.extra == {"losses": save_at}
        found = first.losses + second.run(2)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(unbroken), rtol=1e-9, atol=0)


@pytest.mark.ranks(2)
def test_a_state_needs_the_same_objects(tmp_path: Path) -> None:
    first = Training(TP)
    first.run(1, 2, tmp_path)
    first.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="1 registered objects were saved, there are 2"):
        first.accelerator.load_state(tmp_path)
    with pytest.raises(CheckpointError, match="gradients are being accumulated"):
        first.run(2, 3, tmp_path)
    first.accelerator.window.reset()
    first.accelerator._registered.pop()
    calls: list[str] = []
    first.accelerator.register_save_state_pre_hook(lambda models, _, path: calls.append(path))
    saving = first.accelerator.save_state(tmp_path, asynchronous=True)
    first.accelerator.end_training()
    assert saving.done() and calls == [str(tmp_path)]
