"""`plait train`: the same losses in every layout; going on; what is refused before it starts."""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from plait.cli.app import app
from plait.testing import mutation
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
    """A real `python -m plait train`."""
    command = [sys.executable, "-m", "plait", "train", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=240)


def run(folder: Path, *words: object) -> Any:
    """The same command in this process, or on these ranks, in `folder`."""
    with contextlib.chdir(folder):
        return CliRunner().invoke(app, ["train", *map(str, words)])


def losses(output: Path, key: str = "loss") -> list[float]:
    lines = (output / "log" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line[key] for line in map(json.loads, lines) if key in line]


def trained(folder: Path, output: str, *words: object) -> list[float]:
    done = run(folder, *words, "--output", output)
    assert done.exit_code == 0, done.output[-3000:]
    return losses(folder / output)


SUMS = ["model", "--data", "sums.jsonl", "--steps", 4, "--accumulate", 2, *SMALL]


@pytest.fixture(scope="module")
def one(folder: Path) -> list[float]:
    """The losses of one process, whose model is in `one`."""
    found = trained(folder, "one", *SUMS, "--batch-size", 2)
    assert len(found) == 4
    assert found[3] < found[0]
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("tp", ["--batch-size", "2", "--tp", "2"]), ("dp", ["--dp-shard", "2"])],
    ids=["tp", "dp"],
)
def test_every_layout_has_the_losses_of_one_process(
    name: str, layout: list[str], rank: int, folder: Path, one: list[float]
) -> None:
    assert trained(folder, name, *SUMS, *layout) == pytest.approx(one, rel=1e-5)
    torch.distributed.barrier()  # the first rank has written the model
    expected, found = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / output).state_dict()
        for output in ("one", name)
    )
    assert all((found[k] - x).abs().max() < 1e-4 for k, x in expected.items())


@pytest.fixture(scope="module")
def two_steps(folder: Path) -> list[float]:
    words = ["model", "--data", "sums.jsonl", "--steps", 2, "--batch-size", 2, *SMALL]
    return trained(folder, "two-steps", *words)


@pytest.mark.ranks(2)
def test_data_ranks_that_read_the_same_rows_are_noticed(
    folder: Path, two_steps: list[float]
) -> None:
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": [str(folder / "sums.jsonl")], "seq_length": 32},
        "train": {"steps": 2, "batch_size": 1},
        "layout": {"dp_shard": 2},
        "optimizer": {"lr": 1e-2},
        "reports": {"save_every": 0, "plots": False},
    }
    right, broken = (folder / "mutation" / name for name in ("right", "broken"))
    loop.train(Recipe.from_dict(recipe | {"output": str(right)}))
    with mutation.patched(Places, "data_rank", 0):  # both data ranks read the first one's rows
        loop.train(Recipe.from_dict(recipe | {"output": str(broken)}))
    torch.distributed.barrier()
    assert losses(right) == pytest.approx(two_steps, rel=1e-5)
    assert losses(broken) != pytest.approx(two_steps, rel=1e-5)


@pytest.mark.slow
def test_going_on_in_another_layout_is_the_unbroken_run(folder: Path) -> None:
    common = ["model", "--data", "text.jsonl", "--data", "chat.jsonl", "--batch-size", 2, *SMALL]
    common += ["--set", "optimizer.schedule=constant", "--set", "data.eval=0.1"]
    whole = trained(folder, "unbroken", *common, "--steps", 5)
    first = trained(folder, "broken", *common, "--steps", 3, "--set", "reports.save_every=2")
    # The whole command, which starts its own ranks.
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
    done = run(folder, *words, "--output", "refused")
    assert done.exit_code == 1, done.output
    assert all(text in done.stderr for text in told), done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "refused").exists()


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_smollm2.py"
REAL = ["--steps", "2", "--seq-length", "24", "--accumulate", "1"]
REAL += ["--set", "reports.save_every=0", "--set", "data.eval=null"]


@pytest.fixture(scope="module")
def real(folder: Path) -> tuple[list[str], list[float]]:
    """What the example passes on, with rows of a few tokens and two steps; one process's losses."""
    example = runpy.run_path(str(EXAMPLE))
    example["write"](folder / "python.jsonl")
    words = [str(EXAMPLE.with_suffix(".yaml")), "--data", "python.jsonl"]
    words += ["--set", f"model={example['model_file']()}", *REAL]
    one = trained(folder, "real-one", *words, "--batch-size", 2)
    assert torch.isfinite(torch.tensor(one)).all()
    return words, one


@pytest.mark.slow
def test_the_example_over_two_ranks(real: tuple[list[str], list[float]], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), *REAL, "--batch-size", "2", "--tp", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "train-output" / "run") == pytest.approx(real[1], rel=2e-5)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=240)
def test_smollm2_on_real_text_over_data_ranks(
    folder: Path, real: tuple[list[str], list[float]]
) -> None:
    words, one = real
    found = trained(folder, "real-dp", *words, "--batch-size", 1, "--dp-shard", 2)
    assert found == pytest.approx(one, rel=2e-5)


LORA = ["model", "--data", "sums.jsonl", "--lora-r", 4, "--set", "optimizer.schedule=constant"]
LORA += [*SMALL, "--set", "lora.targets=[q_proj, k_proj, o_proj, down_proj, embed_tokens]"]


@pytest.fixture(scope="module")
def adapter(folder: Path) -> list[float]:
    """The losses of adapters trained by one process, which are in `lora-one`."""
    found = trained(folder, "lora-one", *LORA, "--steps", 4, "--batch-size", 2)
    assert found[3] < found[0]
    return found


def loaded(folder: Path, name: str) -> Any:
    """A trained adapter, read by plain PEFT and transformers."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    return peft.PeftModel.from_pretrained(base, folder / name).eval()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["tp", "dp"])
def test_adapters_trained_in_every_layout(layout: str, folder: Path, adapter: list[float]) -> None:
    sizes = ["--tp", 2, "--batch-size", 2] if layout == "tp" else ["--dp-shard", 2]
    name = f"lora-{layout}"
    assert trained(folder, name, *LORA, "--steps", 4, *sizes) == pytest.approx(adapter, rel=2e-5)
    torch.distributed.barrier()
    mine, expected = loaded(folder, name), loaded(folder, "lora-one")
    wanted = expected.state_dict()
    for key, x in mine.state_dict().items():
        assert (x - wanted[key]).abs().max() < 1e-4, key
    ids = torch.arange(3, 9)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = [m.generate(input_ids=ids, **options) for m in (mine, expected)]
    assert torch.equal(*tokens)


@pytest.mark.ranks(2)
def test_adapters_go_on_in_another_layout(folder: Path, adapter: list[float], rank: int) -> None:
    common = [*LORA, "--output", "lora-broken"]
    first = run(folder, *common, "--steps", 3, "--tp", 2, "--batch-size", 2, "--set",
                "reports.save_every=2")  # fmt: skip
    assert first.exit_code == 0, first.output
    torch.distributed.barrier()
    again = run(folder, *common, "--steps", 4, "--dp-shard", 2, "--resume", "latest")
    assert again.exit_code == 0, again.output
    assert losses(folder / "lora-broken")[-2:] == pytest.approx(adapter[2:], rel=2e-5)
    other = run(folder, *common, "--steps", 4, "--dp-shard", 2, "--resume", "latest", "--set",
                "lora.dropout=0.1")  # fmt: skip
    assert other.exit_code != 0
    assert rank or "lora.dropout: 0.0 then, 0.1 now" in " ".join(other.output.split())


def test_adapters_of_layers_that_are_not_there(folder: Path) -> None:
    done = run(folder, *LORA, "--set", "lora.targets=nowhere", "--steps", 1, "--output", "no")
    assert done.exit_code != 0 and "nowhere" in done.output and "lora.targets" in done.output
