"""`transformers.Trainer` with a split model gives what it gives in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import plait

pytest.importorskip("wrapt")
pytest.importorskip("accelerate")

from tests.ranks import trainer_runs as runs
LAYOUTS = {
    2: {"tp": {"tp_size": 2}, "fsdp": {"dp_shard_size": 2}},
    3: {"fsdp": {"dp_shard_size": 3}},
    4: {
        "tp fsdp": {"tp_size": 2, "dp_shard_size": 2},
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    },
}


def same(split: Any, whole: Any) -> None:
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        ours, theirs = runs.logged(split, name), runs.logged(whole, name)
        assert len(ours) == len(theirs) and ours == pytest.approx(theirs, rel=1e-6, abs=1e-9), name
    state = plait.full_state_dict(split.model)
    for name, expected in whole.model.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.ranks(2, 3, 4)
def test_curves_and_weights(world_size: int, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": runs.samples(8)}
    with runs.alone():
        whole = runs.run(tmp_path / "whole", **options, batch=12 if world_size > 1 else 6)
    for layout in LAYOUTS[world_size].values():
        config = plait.DistributedConfig(**layout)
        data = world_size // layout.get("tp_size", 1)
        split = runs.run(tmp_path / "split", config, ranks=data, **options, batch=12)
        assert split.get_tp_size() == layout.get("tp_size", 1)
        same(split, whole)
