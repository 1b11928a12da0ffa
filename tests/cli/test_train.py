"""`plait train`: the same losses in every layout; going on; what is refused before it starts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from plait.testing import mutation, run_ranks
from plait.train import loop
from plait.train.places import Places
from plait.train.recipe import Recipe
from tests.docs import tiny_hub

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = ["--seq-length", "32", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer, and three kinds of data."""
    folder = tmp_path_factory.mktemp("train")
    tiny_hub.smollm2(folder / "model")
    kinds = {
        "text": [{"text": f"Document {n}. " * (1 + n % 5)} for n in range(20)],
        "sums": [{"prompt": f"{n}+{n}=", "completion": f"{n + n};"} for n in range(20)],
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": f"say {n}"},
                    {"role": "assistant", "content": f"{n}!"},
                ]
            }
            for n in range(8)
        ],
    }
    for name, records in kinds.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
    return folder


def plait_train(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plait", "train", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=240)


def losses(output: Path, key: str = "loss") -> list[float]:
    lines = (output / "log" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line[key] for line in map(json.loads, lines) if key in line]


def trained(folder: Path, output: str, *words: object) -> list[float]:
    done = plait_train(folder, *words, "--output", output)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(folder / output)


@pytest.mark.slow
def test_every_layout_has_the_losses_of_one_process(folder: Path, kind: str = "sums") -> None:
    common = ["model", "--data", f"{kind}.jsonl", "--steps", 4, *SMALL]
    one = trained(folder, f"{kind}-one", *common, "--batch-size", 2, "--accumulate", 2)
    assert len(one) == 4
    assert one[3] < one[0]
    split = trained(folder, f"{kind}-tp", *common, "--batch-size", 2, "--accumulate", 2, "--tp", 2)
    shards = trained(folder, f"{kind}-dp", *common, "--accumulate", 2, "--dp-shard", 2)
    assert split == pytest.approx(one, rel=1e-5)
    assert shards == pytest.approx(one, rel=1e-5)
    weights = [
        transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-{name}").state_dict()
        for name in ("one", "tp", "dp")
    ]
    for other in weights[1:]:
        assert all((other[k] - x).abs().max() < 1e-4 for k, x in weights[0].items())


def train_right_and_broken(recipe: dict[str, Any], output: str) -> None:
    loop.train(Recipe.from_dict(recipe | {"output": f"{output}/right"}))
    with mutation.patched(Places, "data_rank", 0):  # both data ranks read the first one's rows
        loop.train(Recipe.from_dict(recipe | {"output": f"{output}/broken"}))


@pytest.mark.slow
def test_data_ranks_that_read_the_same_rows_are_noticed(folder: Path) -> None:
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": [str(folder / "sums.jsonl")], "seq_length": 32},
        "train": {"steps": 2, "batch_size": 1},
        "layout": {"dp_shard": 2},
        "optimizer": {"lr": 1e-2},
        "reports": {"save_every": 0, "plots": False},
    }
    output = folder / "mutation"
    run_ranks(train_right_and_broken, 2, recipe, str(output), timeout=120)
    common = ["model", "--data", "sums.jsonl", "--steps", 2, *SMALL]
    one = trained(folder, "mutation/one", *common, "--batch-size", 2)
    assert losses(output / "right") == pytest.approx(one, rel=1e-5)
    assert losses(output / "broken") != pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_going_on_in_another_layout_is_the_unbroken_run(folder: Path) -> None:
    common = ["model", "--data", "text.jsonl", "--data", "chat.jsonl", "--batch-size", 2, *SMALL]
    common += ["--set", "optimizer.schedule=constant", "--set", "data.eval=0.1"]
    whole = trained(folder, "unbroken", *common, "--steps", 5)
    first = trained(folder, "broken", *common, "--steps", 3, "--set", "reports.save_every=2")
    done = plait_train(folder, "broken/recipe.yaml", "--resume", "latest", "--steps", 5, "--tp", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "5 steps" in done.stdout
    assert first == pytest.approx(whole[:3], rel=1e-6)
    assert losses(folder / "broken")[-2:] == pytest.approx(whole[3:], rel=1e-5)
    ends = [losses(folder / name, "eval_loss")[-1] for name in ("unbroken", "broken")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    for picture in ("loss", "throughput", "memory"):
        assert (folder / "broken" / f"{picture}.png").stat().st_size > 1000


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(folder: Path) -> None:
    words = ["model", "--data", "text.jsonl", "--steps", "100000", "--output", "stopped", *SMALL]
    command = [sys.executable, "-m", "plait", "train", *words]
    running = subprocess.Popen(
        command, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = folder / "stopped" / "log" / "metrics.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err[-2000:]
    assert "--resume latest" in out
    assert any((folder / "stopped" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model", "--data", "absent.jsonl"], ["absent.jsonl: there is no such file"]),
        (["model", "--data", "text.jsonl", "--set", "train.stepz=1"], ["train.stepz", "steps"]),
        (["./absent", "--data", "text.jsonl"], ["no such directory or file"]),
        (["model", "--data", "bad.jsonl"], ["bad.jsonl, line 1", "txt (nearest: text)"]),
        (["model", "--data", "empty.jsonl"], ["the files hold no text"]),
        (["model", "--data", "text.jsonl", "--resume", "latest"], ["no checkpoints in it"]),
        (["model"], ["data.train"]),
    ],
    ids=["file", "key", "model", "field", "empty", "resume", "no data"],
)
def test_what_is_refused_before_it_starts(folder: Path, words: list[str], told: list[str]) -> None:
    (folder / "bad.jsonl").write_text('{"txt": "a"}\n')
    (folder / "empty.jsonl").write_text("")
    done = plait_train(folder, *words, "--output", "refused")
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(text in done.stderr for text in told), done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "refused").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_on_real_text_in_every_layout(tmp_path: Path) -> None:
    """The example, with rows of a few tokens and two steps."""
    results: dict[str, Any] = {}
    layouts = {"one": ["2"], "tp": ["2", "--tp", "2"], "dp": ["1", "--dp-shard", "2"]}
    script = tiny_hub.__file__.replace("tests/docs/tiny_hub.py", "examples/train_smollm2.py")
    for name, (batch_size, *layout) in layouts.items():
        words = ["--steps", "2", "--seq-length", "24", "--batch-size", batch_size]
        words += ["--accumulate", "1", "--set", "reports.save_every=0", "--set", "data.eval=null"]
        done = subprocess.run(
            [sys.executable, script, *words, *layout, "--output", str(tmp_path / name)],
            cwd=tmp_path,
            env=ENV,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[name] = losses(tmp_path / name)
        for weights in (tmp_path / name).glob("*.safetensors"):
            weights.unlink()
    assert torch.isfinite(torch.tensor(results["one"])).all()
    assert results["tp"] == pytest.approx(results["one"], rel=2e-5)
    assert results["dp"] == pytest.approx(results["one"], rel=2e-5)
