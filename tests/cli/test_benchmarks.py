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


def test_loading():
    small = ["--layers", "1", "--hidden", "64", "--vocab", "96", "--shard", "100KB"]
    found = json.loads(run("loading.py", *small, "--rounds", "1", "--json", "-"))
    for reader in ("plait", "transformers"):
        ranks = found["rounds"][reader][0]
        assert len(ranks) == 2
        assert sum(rank["own_bytes"] for rank in ranks) >= 0.9 * found["checkpoint_bytes"]


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


def test_guard_cost():
    out = run("guard_cost.py", "--rounds", "6")
    figures = [float(line.split()[-2]) for line in out.splitlines() if line.endswith(" ms")]
    assert len(figures) == 4
    assert all(figure > 0 for figure in figures)
