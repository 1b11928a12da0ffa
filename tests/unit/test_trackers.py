"""Logged numbers arrive where they should, and what is missing is told before training."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import plait
from plait.errors import PlaitError
from plait.train import Tracker, trackers


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path: Path) -> None:
    config = {"lr": 0.1, "layout": plait.ParallelismConfig(tp_size=2), "path": tmp_path}
    for run in range(2):  # a run that is resumed writes on
        (tracker,) = trackers.start(["jsonl"], "run", tmp_path, config)
        tracker.log({"loss": torch.tensor(0.5), "by": {"head": [1, 2]}, "n": run}, step=run)
        assert len(lines(tracker.tracker)) == run + 1, "it is there at once"
        tracker.finish()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1]
    assert found[1]["loss"] == 0.5 and found[1]["by"] == {"head": [1, 2]} and found[1]["n"] == 1
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["lr"] == 0.1 and kept["layout"]["tp_size"] == 2 and kept["path"] == str(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = plait.Accelerator(log_with=["tensorboard", "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.25), "note": "a"}, step=7)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (scalar,) = events.Scalars("loss")
    assert (scalar.step, scalar.value) == (7, 0.25)
    assert "config/text_summary" in events.Tags()["tensors"]
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"] == 0.25


class Mine(Tracker):
    name = "mine"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def store_init_configuration(self, values: Any) -> None:
        self.calls.append(dict(values))

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.calls.append((dict(values), step, options))

    def finish(self) -> None:
        self.calls.append("finish")


def test_a_tracker_of_ones_own() -> None:
    mine = Mine()
    accelerator = plait.Accelerator(log_with=mine)
    accelerator.init_trackers("run", {"lr": 1})
    accelerator.log({"loss": torch.tensor(2)}, step=1, log_kwargs={"mine": {"quick": True}})
    assert accelerator.get_tracker("mine") is mine
    assert accelerator.get_tracker("mine", unwrap=True) is mine
    with pytest.raises(PlaitError, match="open are mine"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert mine.calls == [{"lr": 1}, ({"loss": 2}, 1, {"quick": True}), "finish"]


def test_wandb(monkeypatch: Any) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda values, **_: logged.append(values)),
        log=lambda values, step: logged.append((values, step)),
        finish=lambda: logged.append("finish"),
    )
    wandb = SimpleNamespace(init=lambda **options: logged.append(options) or run)
    original = importlib.util.find_spec
    with pytest.raises(PlaitError, match="'wandb' needs the package wandb"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        plait.Accelerator(log_with="wandb")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: wandb if name == "wandb" else original(name)
    )
    monkeypatch.setattr(
        trackers.importlib, "import_module", lambda name: wandb if name == "wandb" else None
    )
    accelerator = plait.Accelerator(log_with="wandb")
    accelerator.init_trackers("project", {"lr": 1}, {"wandb": {"mode": "offline"}})
    accelerator.log({"loss": 1.0}, step=2)
    accelerator.end_training()
    expected = [{"project": "project", "mode": "offline"}, {"lr": 1}, ({"loss": 1.0}, 2), "finish"]
    assert logged == expected


def test_what_is_missing_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match="there is no tracker 'tensorbord'; there are jsonl"):
        plait.Accelerator(log_with="tensorbord", project_dir=tmp_path)
    with pytest.raises(PlaitError, match="'jsonl' writes files, and no project_dir is given"):
        plait.Accelerator(log_with=["jsonl"])
    with pytest.raises(PlaitError, match="object is no tracker: it has no log"):
        plait.Accelerator(log_with=object())
    assert "jsonl" in trackers.checked("all", tmp_path)
    assert trackers.checked([None, "jsonl", "JSONL"], tmp_path) == ["jsonl"]
    with pytest.raises(PlaitError) as caught:
        plait.Accelerator(log_with=["jsonl", "no", "nor"])
    assert len(caught.value.problems) == 3
