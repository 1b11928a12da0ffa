"""Checkpoints of `transformers.Trainer` with a split model are those of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import plait
from plait.proof.numbers import exact
from tests.ranks import trainer_runs as runs
from tests.ranks.test_trainer import correct, same

pytest.importorskip("wrapt")
pytest.importorskip("accelerate")

CONFIG = plait.DistributedConfig(tp_size=2, dp_shard_size=2)


def shared(tmp_path: Path) -> Path:
    """One directory for all ranks."""
    found = [str(tmp_path)]
    dist.broadcast_object_list(found)
    return Path(found[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("writers", ["one process", pytest.param("four", marks=pytest.mark.wide)])
def test_resume_in_the_middle(writers: str, tmp_path: Path) -> None:
    """5 of 8 steps, in the second epoch, then the rest in another number of processes."""
    folder = shared(tmp_path)
    options = {
        "max_steps": 8, "batch": 6, "save_strategy": "steps", "save_steps": 5,
        "eval_strategy": "steps", "eval_dataset": runs.samples(5), "eval_steps": 4,
    }  # fmt: skip
    with exact():
        with runs.alone():
            whole = runs.run(folder / f"whole {dist.get_rank()}", **options)
        dist.barrier()
        saved = folder / "whole 0" / "checkpoint-5"
        if writers == "four":
            split = runs.run(folder / "split", CONFIG, ranks=2, **options)
            same(split, whole)
            saved = folder / "split" / "checkpoint-5"
        sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3}
        given = {name: value for name, value in options.items() if name != "batch"}
        resumed = runs.trainer(folder / "resumed", runs.model(CONFIG), **sizes, **given)
        resumed.train(resume_from_checkpoint=str(saved))
        same(resumed, whole)
        if writers == "four":
            theirs = torch.load(saved / "optimizer.pt", weights_only=True)
            ours = torch.load(folder / "whole 0/checkpoint-5/optimizer.pt", weights_only=True)
            assert theirs["param_groups"] == ours["param_groups"]
            for index, state in ours["state"].items():
                for name, value in state.items():
                    torch.testing.assert_close(theirs["state"][index][name], value)
            with runs.alone():
                given |= {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6}
                back = runs.trainer(folder / f"back {dist.get_rank()}", runs.model(), **given)
                back.train(resume_from_checkpoint=str(saved))
            same(resumed, back)


@pytest.mark.ranks(4)
def test_the_best_model_predictions_and_saving(tmp_path: Path) -> None:
    import transformers

    folder = shared(tmp_path)
    options = {
        "max_steps": 4, "batch": 4, "learning_rate": 0.3, "save_strategy": "steps",
        "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1,
        "load_best_model_at_end": True, "eval_dataset": runs.samples(5),
        "compute_metrics": correct,
    }  # fmt: skip
    with exact():
        with runs.alone():
            whole = runs.run(folder / f"whole {dist.get_rank()}", **options)
        split = runs.run(folder / "split", CONFIG, ranks=2, **options)
        best = [made.state.best_model_checkpoint.rsplit("-")[-1] for made in (split, whole)]
        assert best[0] == best[1] != "4"
        dist.barrier()  # transformers writes on the first rank only
        at = folder / "whole 0" / f"checkpoint-{best[0]}" / "model.safetensors"
        whole.model.load_state_dict(load_file(at))
        same(split, whole)
        split.save_model(str(folder / "final"))
        ours = split.predict(runs.samples(7))
        with runs.alone():
            args = whole.args
            again = runs.trainer(
                folder / f"again {dist.get_rank()}", whole.model,
                per_device_eval_batch_size=args.eval_batch_size,
            )  # fmt: skip
            theirs = again.predict(runs.samples(7))
    assert ours.predictions.shape == (7, 8, 96)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-8, atol=1e-8)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-9)
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "final", dtype=torch.float64
    )
    for name, value in plait.full_state_dict(split.model).items():
        assert torch.equal(made.state_dict()[name], value), name
