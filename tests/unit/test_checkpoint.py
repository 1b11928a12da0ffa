"""Checkpoints of one process: what comes back, what is refused, and what stays on the disk."""

import dataclasses
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from plait.checkpoint import background, latest, load, manifest, save, saving, writing
from plait.errors import CheckpointError
from plait.testing import tiny


class Net(nn.Module):
    """A parameter of every kind: a scalar, one without a gradient, a buffer, tied weights."""

    def __init__(self, width: int = 6, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.inner = nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Linear(5, width))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.out = nn.Linear(width, 11, bias=False)
        if tied:
            self.out.weight = self.table.weight
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("derived", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.table(ids)) * self.scale)


class Data:
    def __init__(self) -> None:
        self.at = {"epoch": 0, "seen": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.at

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state


def step(model: nn.Module, optimizer: Any) -> float:
    model(torch.randint(0, 11, (8,))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    # Not Python's own: the checks of types, which tests run with, draw from it.
    return float(np.random.rand() + torch.rand(()))


def make(kind: str = "AdamW", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Net()
    params = [
        {"params": [p for n, p in model.named_parameters() if "inner" in n], "lr": 0.02},
        {"params": [p for n, p in model.named_parameters() if "inner" not in n]},
    ]
    return model, getattr(torch.optim, kind)(params, lr=0.01, **options)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {n: x.clone() for n, x in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, x in optimizer.state.get(param, {}).items():
            found[f"{name} {key}"] = x.clone() if torch.is_tensor(x) else x
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"{i} {k}": v for k, v in group.items() if k != "params"}
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[k]) and x.dtype == b[k].dtype if torch.is_tensor(x) else x == b[k]
        for k, x in a.items()
    )


OPTIMIZERS = [
    ("AdamW", {}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.1, "centered": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_all_of_it_comes_back_to_the_bit(kind, options, steps, tmp_path: Path) -> None:
    model, optimizer = make(kind, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    data = Data()
    for _ in range(steps):
        step(model, optimizer)
        scheduler.step()
    data.at = {"epoch": 1, "seen": [3, 4]}
    before = everything(model, optimizer)
    path = save(tmp_path, model, optimizer, scheduler, data=data, extra={"best": 0.5, "t": (1,)})
    assert path == latest(tmp_path) == tmp_path / "step-00000000"
    expected = [step(model, optimizer) for _ in range(2)]
    after = everything(model, optimizer)

    model, optimizer = make(kind, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step(model, optimizer)  # a state that must go
    data = Data()
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(7)
    found = load(tmp_path, model, optimizer, scheduler, data=data)
    assert found.extra == {"best": 0.5, "t": (1,)} and found.path == path and found.step == 0
    assert data.at == {"epoch": 1, "seen": [3, 4]}
    assert scheduler.last_epoch == steps
    assert same(everything(model, optimizer), before)
    assert [step(model, optimizer) for _ in range(2)] == expected, "random numbers"
    assert same(everything(model, optimizer), after)


def test_how_an_optimizer_computes_stays_as_it_is(tmp_path: Path) -> None:
    model, optimizer = make("AdamW", foreach=True)
    step(model, optimizer)
    save(tmp_path, model, optimizer)
    model, optimizer = make("AdamW", fused=True, weight_decay=0.5)
    load(tmp_path, model, optimizer)
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], group["weight_decay"]) == (True, None, 1e-2)
    step(model, optimizer)


def test_into_another_dtype(tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer)
    save(tmp_path, model, optimizer)
    half, its = make()
    half.to(torch.bfloat16)
    load(tmp_path, half, its)
    assert torch.equal(half.inner[0].weight, model.inner[0].weight.to(torch.bfloat16))
    state = its.state[half.inner[0].weight]
    assert state["exp_avg"].dtype == torch.float32, "as it was stored"


def test_torch_reads_it_too_and_nothing_is_unpickled(tmp_path: Path, monkeypatch) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = make()
    step(model, optimizer)
    save(tmp_path, model, optimizer)
    weight = model.inner[0].weight
    read = {k: torch.zeros(5, 6) for k in ("inner.0.weight", "inner.0.weight.exp_avg")}
    wanted = {f"{'optimizer' if 'exp' in k else 'model'}.{k}": x for k, x in read.items()}
    dcp.load(wanted, checkpoint_id=latest(tmp_path), no_dist=True)
    assert torch.equal(read["inner.0.weight"], weight)
    assert torch.equal(read["inner.0.weight.exp_avg"], optimizer.state[weight]["exp_avg"])

    def never(*args, **kwargs):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", never)
    monkeypatch.setattr(pickle, "loads", never)
    load(tmp_path, *make())


# --- what is refused ------------------------------------------------------------------------


def damaged(path: Path, how: str, name: str) -> None:
    file = path / name
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(content[: len(content) // 2])
    elif how == "other bytes":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(b"")


@pytest.mark.parametrize("how", ["missing", "short", "other bytes", "empty"])
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "training.pt", "rank-00000.pt", ".metadata", "manifest.json"]
)
def test_a_damaged_one_is_refused_and_the_one_before_is_offered(how, name, tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer)
    good = save(tmp_path, model, optimizer, step=5)
    damaged(save(tmp_path, model, optimizer, step=10), how, name)
    step(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, model, optimizer)
    assert f"step-00000010: {name}" in str(caught.value) or "step-00000010: it has no" in str(
        caught.value
    )
    assert "step=5: step-00000005 is complete" in caught.value.ways_out
    assert same(everything(model, optimizer), before), "nothing was changed"
    assert load(tmp_path, model, optimizer, step=5).path == good


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m, "more", nn.Linear(2, 2)), "more.weight is missing in it"),
        (lambda m: delattr(m, "unused"), "unused is not in the model"),
        (lambda m: setattr(m, "unused", nn.Parameter(torch.ones(4))), "unused: shape (3,) in it, "),
        (lambda m: m.to("meta"), "scale has no memory yet (meta)"),
    ],
)
def test_another_model_is_refused(change, text, tmp_path: Path) -> None:
    save(tmp_path, Net())
    model = Net()
    change(model)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, model)
    assert text in str(caught.value)
    if not model.scale.is_meta:
        assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    save(tmp_path, Net())
    model = Net(width=7)
    del model.scale
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    for part in ("table.weight: shape", "scale is not", "no optimizer was", "no scheduler was"):
        assert part in str(caught.value)


def test_tied_and_separate_weights(tmp_path: Path) -> None:
    save(tmp_path / "tied", Net(tied=True))
    separate = Net(tied=False)
    load(tmp_path / "tied", separate)
    assert torch.equal(separate.out.weight, separate.table.weight)
    save(tmp_path / "separate", separate)
    with pytest.raises(CheckpointError, match="are two tensors in it, one in the model"):
        load(tmp_path / "separate", Net(tied=True))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer)
    save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="the optimizer is SGD, the stored one AdamW"):
        load(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="has 1 groups of parameters, the stored one 2"):
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    groups = [{"params": [model.scale]}, {"params": [model.unused]}]
    with pytest.raises(CheckpointError, match=r"group 0: inner\.0\.bias is only stored"):
        load(tmp_path, model, torch.optim.AdamW(groups))
    with pytest.raises(CheckpointError, match="2 parameters of the optimizer are not the model's"):
        save(tmp_path, model, torch.optim.AdamW(nn.Linear(2, 2).parameters()))


class Odd:
    pass


def test_what_cannot_be_stored_safely_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, Net(), extra={"a": 1, "b": [Odd(), {"c": Odd()}]})
    text = str(caught.value)
    assert "extra['b'][0] is a " in text and "extra['b'][1]['c'] is a " in text
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"step": -1}, {"step": True}, {"keep": 0}, {"keep": 1.5}])
def test_arguments(options, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(options))}="):
        save(tmp_path, Net(), **options)


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="none is there"):
            load(directory, Net())
    save(tmp_path, Net(), step=4)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3") as caught:
        load(tmp_path, Net(), step=3)
    assert caught.value.ways_out == ("step=4, of 4 that are there",)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file", Net())


# --- what stays on the disk -------------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def test_the_last_ones_stay(tmp_path: Path) -> None:
    model = Net()
    for i in (1, 2, 3, 4):
        save(tmp_path, model, step=i, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    save(tmp_path, model, keep=None)
    assert names(tmp_path) == [f"step-0000000{i}" for i in (3, 4, 5)]
    model.scale.data.fill_(9)
    assert save(tmp_path, model, step=3).name == "step-00000003-2", "the older one is not touched"
    assert names(tmp_path) == ["step-00000003-2", "step-00000004", "step-00000005"]
    load(tmp_path, model, step=4)
    assert model.scale == 1.5
    load(tmp_path / "step-00000003-2", model)
    assert model.scale == 9


def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path) -> None:
    for i in (1, 2, 8, 9):
        save(tmp_path, Net(), step=i)
    path = save(tmp_path, Net(), step=3, keep=1)
    assert latest(tmp_path) == path and names(tmp_path) == ["step-00000003"]
    assert load(tmp_path, Net()).step == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_is_the_one_that_was_committed_last(asynchronous, tmp_path: Path) -> None:
    for i in (10, 20, 30):
        save(tmp_path, Net(), step=i)
    load(tmp_path, Net(), step=10)
    for i in (11, 12):
        path = save(tmp_path, Net(), step=i, keep=3, asynchronous=asynchronous)
        path = path.wait() if asynchronous else path
        assert latest(tmp_path) == path
    assert names(tmp_path) == ["step-00000011", "step-00000012", "step-00000030"]
    (tmp_path / "step-00000012" / "training.pt").unlink()
    with pytest.raises(CheckpointError, match="step=11: step-00000011 is complete"):
        load(tmp_path, Net())


def test_folders_of_earlier_versions_come_first_by_step(tmp_path: Path) -> None:
    for i in (3, 9, 5):
        path = save(tmp_path, Net(), step=i)
        (path / "order").unlink()
        whole = manifest.read(path)
        files = {name: file for name, file in whole.files.items() if name != "order"}
        manifest.store(path, dataclasses.replace(whole, files=files))
    assert latest(tmp_path).name == "step-00000009" and load(tmp_path, Net()).step == 9
    save(tmp_path, Net(), step=4)
    assert latest(tmp_path).name == "step-00000004"
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000009"]


def test_leftovers_of_killed_runs_are_not_seen_and_go(tmp_path: Path) -> None:
    save(tmp_path, Net(), step=1)
    for name in ("step-00000002.partial-0a1b", "step-00000000.removing-77"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path).name == "step-00000001"
    save(tmp_path, Net())
    assert names(tmp_path) == ["notes", "step-00000001", "step-00000002"]


def test_a_failure_leaves_no_checkpoint_and_the_next_save_works(
    tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path, Net(), step=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "store", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, Net(), step=2)
    assert latest(tmp_path).name == "step-00000001"
    assert names(tmp_path) == ["step-00000001"]
    save(tmp_path, Net(), step=2)


# --- asynchronous -----------------------------------------------------------------------------


def test_asynchronous_saves_what_was_there_at_the_call(tmp_path: Path, monkeypatch) -> None:
    go = threading.Event()
    write = writing.write_part

    def later(job):
        assert go.wait(20)
        return write(job)

    monkeypatch.setattr(writing, "write_part", later)
    model, optimizer = make()
    step(model, optimizer)
    before = everything(model, optimizer)
    pending = save(tmp_path, model, optimizer, asynchronous=True)
    step(model, optimizer)
    assert not pending.done() and latest(tmp_path) is None
    go.set()
    assert pending.wait() == latest(tmp_path) and pending.done()
    load(tmp_path, model, optimizer)
    assert same(everything(model, optimizer), before)


def test_the_next_save_waits_and_hears_of_a_failure(tmp_path: Path, monkeypatch) -> None:
    first = save(tmp_path, Net(), asynchronous=True)
    second = save(tmp_path, Net(), asynchronous=True)
    assert first.done()
    assert second.wait().name == "step-00000001"

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "store", full)
        save(tmp_path, Net(), asynchronous=True)
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, Net())
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, Net(), asynchronous=True).wait()
    assert save(tmp_path, Net()).name == "step-00000002"
    assert background._current is None


def test_loading_waits_for_what_is_being_saved(tmp_path: Path) -> None:
    save(tmp_path, Net(), step=1)
    save(tmp_path, Net(), step=2, asynchronous=True)
    assert load(tmp_path, Net()).step == 2


def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    script = f"""
        import random, time
        from torch import nn
        from plait.checkpoint import load, save, writing
        write = writing.write_part
        def slow(job):
            time.sleep(0.2)
            return write(job)
        writing.write_part = slow
        state = random.getstate()
        save({str(tmp_path)!r}, nn.Linear(2, 2), step=7, asynchronous=True)
        expected = random.random()
        load(save({str(tmp_path)!r}, nn.Linear(2, 2), asynchronous=True).wait(), nn.Linear(2, 2))
        after = random.getstate()
        random.setstate(state)
        assert random.random() == expected and random.getstate() == after
        save({str(tmp_path)!r}, nn.Linear(2, 2), step=9, asynchronous=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert latest(tmp_path).name == "step-00000009"


def test_a_compiled_model_is_the_model(tmp_path: Path) -> None:
    model = tiny.model("mlp")
    save(tmp_path, torch.compile(model))
    load(tmp_path, model)


def test_more_ranks_than_one_need_a_split_model(tmp_path: Path, monkeypatch) -> None:
    world = saving.environment.World(0, 2, 0, True)
    monkeypatch.setattr(saving.environment, "world", lambda: world)
    with pytest.raises(CheckpointError, match="there are 2 ranks: each would save a copy"):
        save(tmp_path, Net())
