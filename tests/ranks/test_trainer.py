"""`transformers.Trainer` with a split model gives what it gives in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.errors import PlaitError
from plait.hf.trainer import training
from plait.proof.numbers import exact
from plait.testing import mutation
from tests.ranks import trainer_runs as runs

pytest.importorskip("wrapt")
pytest.importorskip("accelerate")

LAYOUTS = {
    2: {"tp": {"tp_size": 2}, "fsdp": {"dp_shard_size": 2}},
    3: {"fsdp": {"dp_shard_size": 3}},
    4: {
        "tp fsdp": {"tp_size": 2, "dp_shard_size": 2},
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    },
}
NAMED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_correct")


def same(split: Any, whole: Any, close: float = 1e-9) -> None:
    for name in NAMED:
        ours, theirs = runs.logged(split, name), runs.logged(whole, name)
        near = max(close, 1e-6) if name == "loss" else close  # the Trainer adds it up in float32
        assert len(ours) == len(theirs) and ours == pytest.approx(theirs, rel=near), name
    state = plait.full_state_dict(split.model)
    for name, expected in whole.model.state_dict().items():
        torch.testing.assert_close(
            state[name], expected, rtol=close, atol=close, msg=lambda m, name=name: f"{name}: {m}"
        )


def both(tmp_path: Path, layout: dict[str, int], world_size: int, **options: Any) -> Any:
    data = world_size // layout.get("tp_size", 1)
    with exact():
        with runs.alone():
            whole = runs.run(tmp_path / "whole", **options)
        config = plait.DistributedConfig(**layout)
        split = runs.run(tmp_path / "split", config, ranks=data, **options)
    return split, whole


def correct(given: Any) -> dict[str, float]:
    """Right predictions, in all of the evaluation's samples."""
    logits, labels = given.predictions[:, :-1], given.label_ids[:, 1:]
    return {"correct": float(((np.argmax(logits, -1) == labels) & (labels >= 0)).sum())}


@pytest.mark.ranks(2, 3, 4)
def test_curves_and_weights(world_size: int, tmp_path: Path) -> None:
    """Epochs end with a batch that has no sample for some ranks; 20 = 12 + 8, 13 = 12 + 1."""
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": runs.samples(13),
        "train_dataset": runs.samples(25), "max_steps": 5, "compute_metrics": correct, "batch": 12,
    }  # fmt: skip
    for layout in LAYOUTS[world_size].values():
        split, whole = both(tmp_path, layout, world_size, **options)
        assert split.get_tp_size() == layout.get("tp_size", 1)
        assert len(runs.logged(split, "eval_correct")) == 3
        same(split, whole)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function as users write them: of this rank's samples, over the number of all."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 1.5 * total / num_items_in_batch


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": -1},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "max_grad_norm": 0.0,
    },
    "smoothing": {"label_smoothing_factor": 0.1},
    "own loss": {"compute_loss_func": own_loss, "gradient_accumulation_steps": 2},
    "drop last": {"dataloader_drop_last": True, "max_steps": 5, "batch": 12},
    "sgd": {"optim": "sgd", "weight_decay": 0.1},
    "tied": {"model_options": {"tie_word_embeddings": True}},
}


QUICK = ("accumulation", "reentrant", "own loss")
"""Those that are not for `make test-wide` alone."""


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in SETTINGS],
)
def test_settings(name: str, tmp_path: Path) -> None:
    options = {"max_steps": 3, "batch": 4, **SETTINGS[name]}
    split, whole = both(tmp_path, LAYOUTS[4]["tp fsdp"], 4, **options)
    same(split, whole)


@pytest.mark.ranks(4)
def test_gradient_checkpointing(tmp_path: Path) -> None:
    """In float32: what is computed again in `exact` is not exact."""
    options = {"gradient_checkpointing": True, "max_steps": 3, "batch": 4}
    with runs.alone():
        whole = runs.run(tmp_path / "whole", **options)
    config = plait.DistributedConfig(**LAYOUTS[4]["tp fsdp"])
    same(runs.run(tmp_path / "split", config, ranks=2, **options), whole, close=1e-5)


@pytest.mark.ranks(4)
def test_half_precision(tmp_path: Path) -> None:
    options = {"bf16": True, "max_steps": 4, "model_options": {"dtype": torch.float32}}
    with runs.alone():
        whole = runs.run(tmp_path / "whole", batch=4, **options)
    config = plait.DistributedConfig(**LAYOUTS[4]["tp fsdp"])
    split = runs.run(tmp_path / "split", config, ranks=2, batch=4, **options)
    losses = runs.logged(split, "loss"), runs.logged(whole, "loss")
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    norms = runs.logged(split, "grad_norm"), runs.logged(whole, "grad_norm")
    assert norms[0] == pytest.approx(norms[1], rel=3e-2)


@pytest.mark.ranks(2)
def test_a_loss_that_counts_every_rank_is_noticed(tmp_path: Path) -> None:
    def compare() -> None:
        options = {"batch": 4, "max_steps": 2, "max_grad_norm": 0.0}
        same(*both(tmp_path, LAYOUTS[2]["fsdp"], 2, **options))

    compare()
    own_size = training.SplitTrainer.get_tp_size
    with mutation.must_fail(
        training.SplitTrainer, "get_tp_size", lambda self: self._plait_state.tp_size
    ):
        compare()
    assert training.SplitTrainer.get_tp_size is own_size


@pytest.mark.ranks(2)
def test_what_contradicts_the_layout_is_refused(tmp_path: Path) -> None:
    import accelerate

    model = runs.model(plait.DistributedConfig(tp_size=2))
    with pytest.raises(PlaitError, match="average_tokens_across_devices=False") as told:
        runs.trainer(
            tmp_path, model,
            average_tokens_across_devices=False,
            parallelism_config=accelerate.ParallelismConfig(dp_shard_size=2),
            torch_compile=True,
        )  # fmt: skip
    problems = str(told.value)
    assert "parallelism_config has dp_shard_size=2, the model 1" in problems
    assert "tp_size=1, the model 2" in problems and "torch_compile" in problems
    with pytest.raises(PlaitError, match="fsdp='full_shard' would shard it once more"):
        made = runs.trainer(tmp_path, runs.model())  # somebody else's model is as ever
        assert type(made).__mro__[0].__module__ == "transformers.trainer"
        made.args.fsdp = "full_shard"
        type(made)(model=model, args=made.args)
    with (
        runs.alone(),
        pytest.raises(PlaitError, match=r"runs on 1 process\(es\), the model lies on 2"),
    ):
        runs.trainer(tmp_path, model)
    agreed = accelerate.ParallelismConfig(tp_size=2)
    assert runs.trainer(tmp_path, model, parallelism_config=agreed).get_tp_size() == 2


@pytest.mark.ranks(2)
def test_settings_of_others_are_refused(tmp_path: Path) -> None:
    model = runs.model(plait.DistributedConfig(tp_size=2))
    with pytest.raises(PlaitError, match="dispatch_batches=True: each data rank reads") as told:
        runs.trainer(
            tmp_path, model, accelerator_config={"dispatch_batches": True, "split_batches": True}
        )
    assert "split_batches=True: a batch size is that of one data rank" in str(told.value)
    made = runs.trainer(tmp_path, model)
    made.args.deepspeed = "zero.json"
    with pytest.raises(PlaitError, match=r"deepspeed='zero.json' would shard it once more"):
        type(made)(model=model, args=made.args)
    with pytest.raises(PlaitError, match="use_liger_kernel=True"):
        runs.trainer(tmp_path, model, use_liger_kernel=True)


class OddBatches(torch.utils.data.BatchSampler):
    """Decides about whole batches."""

    def __iter__(self) -> Any:
        yield from ([0], [1, 2], [3])


@pytest.mark.ranks(2)
def test_samplers_of_batches_are_refused(tmp_path: Path) -> None:
    data = runs.samples(4)
    batches = OddBatches(torch.utils.data.SequentialSampler(data), 2, drop_last=False)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)  # type: ignore[arg-type]
    for layout in LAYOUTS[2].values():
        made = runs.trainer(tmp_path, runs.model(plait.DistributedConfig(**layout)))
        made.get_train_dataloader = lambda made=made: made.accelerator.prepare(loader)
        with pytest.raises(PlaitError, match="their sampler is a OddBatches"):
            made.train()
    with runs.alone():  # somebody else's model is as ever
        unsplit = runs.trainer(tmp_path, runs.model())
        unsplit.get_train_dataloader = lambda: loader
        unsplit.train()
