"""SmolLM2 in a Trainer: the curve of one process, by the functions of the example."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import trainer_runs as runs

pytest.importorskip("wrapt")
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAYOUTS = {2: ["--tp", "2"], 4: ["--tp", "2", "--dp-shard", "2"]}


def pieces(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Ids, without the time that the tokenizer takes to read."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40000, (count, length), generator=draw)
    return [{"input_ids": piece, "labels": piece} for piece in ids]


@pytest.mark.slow
@pytest.mark.ranks(2, 4, timeout=300)
def test_the_curve_is_that_of_one_process(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    example: Any = importlib.import_module("trainer_smollm2")
    words = ["--steps", "3", "--batch-size", "2", "--output", str(tmp_path)]
    expected: list[Any] = [None]
    if dist.get_rank() == 0:
        with runs.alone():
            expected = [example.train(example.arguments(words), pieces(6, 12))]
    dist.broadcast_object_list(expected)
    found = example.train(example.arguments([*words, *LAYOUTS[world_size]]), pieces(6, 12))
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        ours, theirs = ([step[name] for step in steps] for steps in (found, expected[0]))
        # The norm is that of gradients in float32 of a step with large ones: rounding shows sooner.
        limit = 1e-3 if name == "grad_norm" else 1e-4
        assert len(ours) == 3 and ours == pytest.approx(theirs, rel=limit), name
