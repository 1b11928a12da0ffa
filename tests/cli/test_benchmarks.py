"""Each benchmark runs, at a very small size, and says what it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the figures come from /proc"),
]


def run(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tp_compare():
    small = ["--layers", "1", "--hidden", "64", "--vocab", "96", "--sequence", "32"]
    phases = ["prefill", "train"]
    out = run("tp_compare.py", *small, "--only", *phases, "--rounds", "1", "--json", "-")
    found = json.loads(out)
    for phase in phases:
        samples = found["samples"][phase]
        assert {"one process", "plait", "transformers"} <= set(samples), phase
        assert all(sample["cpu_s"] > 0 for rounds in samples.values() for sample in rounds)
    # Per layer two all-reduces, one for the embedding, one gather of the logits' last position.
    calls, num_bytes = found["collectives"]["prefill"]["plait"][0]
    assert (calls, num_bytes) == (4, 4 * (3 * 32 * 64 + 96))
    assert found["peak_bytes"]["train"]["plait"] > 0
    # Training: the embedding and two per layer, each way, and for the loss two of numbers a token
    # (the maximum; the sum of exponentials and the label's logit). No logits travel.
    (calls, num_bytes), (both_calls, both_bytes) = found["collectives"]["train"]["plait"]
    hidden, token = 4 * 32 * 64, 4 * 32
    assert (calls, num_bytes) == (3 + 2, 3 * hidden + 3 * token)
    assert (both_calls, both_bytes) == (calls + 3, num_bytes + 3 * hidden)


def test_training_memory():
    small = ["--layers", "1", "--hidden", "128", "--vocab", "32000", "--sequence", "128"]
    out = run("training_memory.py", *small, "--only", "head", "--rounds", "1", "--json", "-")
    found = json.loads(out)["head"]["bytes"]
    peer, plait = found["transformers TP"], found["plait, `tp_size`"]
    assert plait["of_the_step"] < 0.75 * peer["of_the_step"]
    assert all(0 < row["of_the_step"] < row["peak"] for row in found.values())


@pytest.mark.wide
def test_loading():
    small = ["--layers", "1", "--hidden", "64", "--vocab", "96", "--shard", "100KB"]
    found = json.loads(run("loading.py", *small, "--rounds", "1", "--json", "-"))
    for reader in ("plait", "transformers"):
        ranks = found["rounds"][reader][0]
        assert len(ranks) == 2
        assert sum(rank["own_bytes"] for rank in ranks) >= 0.9 * found["checkpoint_bytes"]


def test_saving():
    small = ["--layers", "1", "--hidden", "512", "--vocab", "48000", "--shard", "50MB"]
    found = json.loads(run("saving.py", *small, "--rounds", "1", "--ranks", "2", "--json", "-"))
    for way in ("save_pretrained", "checkpoint.save", "checkpoint.load"):
        assert len(found["rounds"][way][0]) == 2
    ranks = found["rounds"]["save_pretrained"][0]
    # One tensor, and what a process of Python moves by itself (10 MB).
    assert all(rank["extra_bytes"] < found["largest_bytes"] + 20e6 for rank in ranks), ranks


@pytest.mark.wide
def test_tp_speedup(tmp_path):
    small = ["--layers", "1", "--hidden", "64", "--vocab", "96", "--sequence", "8", "--rounds", "1"]
    picture, times = tmp_path / "speedup.png", tmp_path / "times.json"
    out = run(
        "tp_speedup.py", *small, "--tp", "2", "--batch", "1", "2",
        "--out", str(picture), "--json", str(times),
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "batch 2: tp 1: 1.00 (1.00–1.00), tp 2:" in out
    points = json.loads(times.read_text())["points"]
    assert [(p["batch_size"], p["tp_size"]) for p in points] == [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.wide
def test_guard_cost():
    out = run("guard_cost.py", "--rounds", "6")
    figures = [float(line.split()[-2]) for line in out.splitlines() if line.endswith(" ms")]
    assert len(figures) == 4
    assert all(figure > 0 for figure in figures)
