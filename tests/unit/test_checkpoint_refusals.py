"""Loads that are refused change nothing; saves that fail are heard of."""

import copy
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.checkpoint import background, load, save
from plait.errors import CheckpointError, RankError


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("counts", torch.arange(3))
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)) * self.scale


class Kept(nn.Module):
    """A module with a state of its own, which takes only lists."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = [0]

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen.append("half")
        if not isinstance(state, list):
            raise ValueError("no list")
        self.seen = state


class Data:
    """A position that notices only half-way that it does not like a state."""

    def __init__(self, at: int = 0, picky: bool = False) -> None:
        self.at, self.picky, self.seen = at, picky, [at]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(state["at"])
        self.at = state["at"]
        if self.picky and state["at"] == 1:
            raise ValueError("not this position")
        self.seen = list(state["seen"])


class Training:
    def __init__(self, model: nn.Module | None = None, at: int = 0, groups: int = 1) -> None:
        self.model = model or Net()
        params = list(self.model.parameters())
        split = [params] if groups == 1 else [params[:2], params[2:]]
        self.optimizer: Any = torch.optim.AdamW([{"params": g} for g in split], lr=0.1)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.data = Data(at)
        for _ in range(at + 1):
            self.model(torch.rand(2, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def digest(self) -> str:
        """Everything, to the bit."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "data": self.data and vars(self.data),
            # Not Python's own: the checks of types, which tests run with, draw from it.
            "rng": torch.get_rng_state().tolist(),
        }
        with torch._tensor_str.printoptions(precision=17, threshold=10**6):
            return repr(copy.deepcopy(parts))

    def load(self, path: Path) -> None:
        load(path, self.model, self.optimizer, self.scheduler, data=self.data)


def other_scheduler(t: Training) -> None:
    t.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, 5)


def failing_scheduler(t: Training) -> None:
    def refuse(state: Any) -> None:
        type(t.scheduler).load_state_dict(t.scheduler, state)
        if state["last_epoch"] == 2:
            raise ValueError("no such schedule")

    t.scheduler.load_state_dict = refuse


def picky_data(t: Training) -> None:
    t.data = Data(7, picky=True)


def other_optimizer(t: Training) -> None:
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)


def fewer_parameters(t: Training) -> None:
    t.optimizer = torch.optim.AdamW(list(t.model.parameters())[1:], lr=0.1)


def another_kind(t: Training) -> None:
    t.model.counts = t.model.counts.float()


def no_room_for_extra(t: Training) -> None:
    t.model.kept = nn.Identity()


REFUSALS: list[tuple[Callable[[Training], None], str]] = [
    (other_scheduler, "scheduler is CosineAnnealingLR, the stored one StepLR"),
    (failing_scheduler, "no such schedule"),
    (picky_data, "not this position"),
    (other_optimizer, "optimizer is SGD"),
    (fewer_parameters, "only stored"),
    (another_kind, "counts: torch.int64 in it, torch.float32 in the model"),
    (no_room_for_extra, "extra state"),
]


@pytest.mark.parametrize(("change", "told"), REFUSALS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_refused_load_changes_nothing(change: Any, told: str, tmp_path: Path) -> None:
    first = Training(at=1)
    save(tmp_path, first.model, first.optimizer, first.scheduler, data=first.data, step=1)
    here = Training(at=3)
    change(here)
    before = here.digest()
    with pytest.raises((CheckpointError, ValueError), match=told):
        here.load(tmp_path)
    assert here.digest() == before


@pytest.mark.parametrize(
    "given", [{"model": Net(5)}, {"groups": 2}], ids=["shapes", "numbers of groups"]
)
def test_another_form_changes_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    first = Training(at=1)
    save(tmp_path, first.model, first.optimizer, first.scheduler, data=first.data, step=1)
    here = Training(at=3, **given)
    before = here.digest()
    with pytest.raises(CheckpointError):
        here.load(tmp_path)
    assert here.digest() == before


def test_extra_state_that_a_module_refuses(tmp_path: Path) -> None:
    first, here = Training(at=1), Training(at=3)
    first.model.kept.seen = {"no": "list"}
    save(tmp_path, first.model, first.optimizer, first.scheduler, data=first.data, step=1)
    before = here.digest()
    with pytest.raises(ValueError, match="no list"):
        here.load(tmp_path)
    assert here.digest() == before


def test_what_was_not_saved(tmp_path: Path) -> None:
    save(tmp_path, Net(), step=1)
    here = Training(at=3)
    before = here.digest()
    with pytest.raises(CheckpointError, match="no scheduler was saved"):
        here.load(tmp_path)
    assert here.digest() == before


def ended(tmp_path: Path, last: str) -> "subprocess.CompletedProcess[str]":
    script = f"""
        from torch import nn
        from plait.checkpoint import manifest, save
        def full(*args):
            raise OSError(28, "No space left on device")
        manifest.store = full
        pending = save({str(tmp_path)!r}, nn.Linear(2, 2), step=7, asynchronous=True)
        print("trained")
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script) + last],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_failed_save_that_nobody_waits_for_is_told_at_the_end(tmp_path: Path) -> None:
    found = ended(tmp_path, "")
    assert found.returncode == 1 and found.stdout == "trained\n"
    assert "step-00000007 was NOT saved" in found.stderr and str(tmp_path) in found.stderr
    assert "Traceback" in found.stderr and "No space left" in found.stderr


def test_one_that_was_waited_for_is_not_told_again(tmp_path: Path) -> None:
    found = ended(tmp_path, "try:\n    pending.wait()\nexcept Exception:\n    pass\n")
    assert found.returncode == 0 and found.stderr == ""


def test_a_slow_disk_is_waited_for_and_a_rank_that_is_gone_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "STALL_S", 0.2)
    job: Any = type("Job", (), {"partial": tmp_path, "asked": "save:"})()
    arrived = threading.Event()

    def slow() -> None:
        with background._alive(tmp_path):
            time.sleep(0.9)  # as in one long fsync: no file grows
            arrived.set()

    thread = threading.Thread(target=slow)
    thread.start()
    background._await(job, arrived.is_set)
    thread.join()
    began = time.monotonic()
    with pytest.raises(RankError, match="no rank has been writing"):
        background._await(job, lambda: False)
    assert time.monotonic() - began < 5
    assert os.listdir(tmp_path) == []
