"""Runs of transformers' Trainer, on all ranks of a group and in one process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import plait
from plait.testing import add_noise, tiny

_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def fresh() -> None:
    """Let accelerate forget what it has found out about the processes."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In this block accelerate and transformers see one process."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name in _RUN}
    fresh()
    try:
        yield
    finally:
        os.environ.update(kept)
        fresh()


def samples(count: int = 20, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Sentences of equal lengths, a different number of whose tokens count."""
    made = []
    for number in range(count):
        one = {k: v[0] for k, v in tiny.batch("llama", size=1, length=length, seed=number).items()}
        one["labels"][: number % (length - 1)] = -100
        made.append(one)
    return made


def model(split: Any = None, **options: Any) -> Any:
    """A small model, split or whole."""
    made = add_noise(tiny.model("llama", **options)).train()
    return made if split is None else plait.parallelize(made, split)


def trainer(folder: Path, split_model: Any, **options: Any) -> Any:
    """A plain Trainer."""
    import transformers

    fresh_args = ("train_dataset", "eval_dataset", "compute_metrics", "compute_loss_func")
    given = {name: options.pop(name) for name in fresh_args if name in options}
    given.setdefault("train_dataset", samples())
    settings: dict[str, Any] = {
        "max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return transformers.Trainer(model=split_model, args=args, **given)


def logged(made: Any, name: str) -> list[float]:
    """What a Trainer has logged under one name, step by step."""
    return [entry[name] for entry in made.state.log_history if name in entry]


def run(folder: Path, split: Any = None, *, ranks: int = 1, batch: int = 6, **options: Any) -> Any:
    """Train with a global batch; gives the Trainer."""
    model_options = options.pop("model_options", {})
    sizes = {"per_device_train_batch_size": batch // ranks}
    sizes["per_device_eval_batch_size"] = batch // ranks
    made = trainer(folder, model(split, **model_options), **sizes, **options)
    made.train()
    return made
