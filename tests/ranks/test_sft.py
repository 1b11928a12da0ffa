"""TRL's `SFTTrainer` with a split model gives what it gives in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.errors import PlaitError
from plait.hf.trainer import sft
from plait.proof.numbers import exact
from plait.testing import mutation
from tests.docs.tiny_hub import byte_tokenizer
from tests.ranks import trainer_runs as runs

pytest.importorskip("wrapt")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

LAYOUTS = {
    2: [{"tp_size": 2}, {"dp_shard_size": 2}],
    3: [{"tp_size": 3}],
    4: [{"tp_size": 2, "dp_shard_size": 2}],
}
NAMED = (
    "loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss",
    "eval_entropy", "eval_mean_token_accuracy",
)  # fmt: skip
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}


def data(count: int) -> Any:
    """Prompts and completions of many lengths."""
    words = ["split", "models", "train", "as", "whole", "ones", "do"]
    made = [
        {"prompt": words[n % 7] + " ", "completion": " ".join(words[: 1 + n % 5])}
        for n in range(count)
    ]
    return datasets.Dataset.from_list(made)


def run(folder: Path, split: Any = None, *, ranks: int = 1, batch: int = 6, **options: Any) -> Any:
    """Train with a global batch; gives the Trainer."""
    names = ("peft_config", "eval_dataset", "compute_metrics", "compute_loss_func")
    given = {name: options.pop(name) for name in names if name in options}
    given.setdefault("train_dataset", data(options.pop("count", 25)))
    tokenizer = byte_tokenizer()
    model_options = {"dtype": torch.float64, **options.pop("model_options", {})}
    model = runs.model(split, vocab_size=len(tokenizer), **model_options)
    settings: dict[str, Any] = {
        "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5,
        "bf16": False, "gradient_checkpointing": False, "max_length": 48,
        "per_device_train_batch_size": batch // ranks, "per_device_eval_batch_size": batch // ranks,
    }  # fmt: skip
    args = trl.SFTConfig(output_dir=str(folder), **{**settings, **options})
    made = trl.SFTTrainer(model=model, args=args, processing_class=tokenizer, **given)
    made.train()
    return made


def same(split: Any, whole: Any, close: float = 2e-6) -> None:
    """In one process TRL computes scores in float32, which Adam makes more of than SGD."""
    for name in NAMED:
        ours, theirs = runs.logged(split, name), runs.logged(whole, name)
        assert len(ours) == len(theirs) and ours == pytest.approx(theirs, rel=close), name
    assert runs.logged(split, "mean_token_accuracy")
    state = plait.full_state_dict(split.model)
    for name, expected in whole.model.state_dict().items():
        torch.testing.assert_close(
            state[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def both(folder: Path, layout: dict[str, int], world_size: int, **options: Any) -> Any:
    ranks = world_size // layout.get("tp_size", 1)
    with exact():
        with runs.alone():
            whole = run(folder / "whole", **options)
        config = plait.DistributedConfig(**layout)
        split = run(folder / "split", config, ranks=ranks, **options)
    return split, whole


def correct(given: Any) -> dict[str, float]:
    logits, labels = given.predictions[:, :-1], given.label_ids[:, 1:]
    return {"correct": float(((np.argmax(logits, -1) == labels) & (labels >= 0)).sum())}


@pytest.mark.ranks(2, 3, 4)
def test_curves_metrics_and_weights(world_size: int, tmp_path: Path) -> None:
    """The last batch of an epoch (25 = 24 + 1) and of the evaluation has none for some ranks."""
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data(13), "batch": 12,
    }  # fmt: skip
    for layout in LAYOUTS[world_size]:
        same(*both(tmp_path, layout, world_size, **options))


@pytest.mark.ranks(2, 4)
def test_adapters(world_size: int, tmp_path: Path) -> None:
    for layout in LAYOUTS[world_size]:
        config = peft.LoraConfig(**LORA)
        split, whole = both(tmp_path, layout, world_size, peft_config=config)
        same(split, whole)


SETTINGS: dict[str, dict[str, Any]] = {
    "packing": {
        "packing": True, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data(13),
        "count": 60,
    },
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "count": 60},
    "padding free": {"padding_free": True, "max_length": None, "batch": 12},
    "dft": {"loss_type": "dft", "gradient_accumulation_steps": 2},
    "whole text": {"completion_only_loss": False, "model_options": {"tie_word_embeddings": True}},
    "smoothing": {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2,
                  "eval_dataset": data(13)},
    "predictions": {"compute_metrics": correct, "eval_strategy": "steps", "eval_steps": 2,
                    "eval_dataset": data(13)},
}  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.filterwarnings("ignore")
def test_settings(name: str, tmp_path: Path) -> None:
    options = {"max_steps": 3, "batch": 4, "optim": "sgd", "learning_rate": 0.3, **SETTINGS[name]}
    split, whole = both(tmp_path, LAYOUTS[4][0], 4, **options)
    same(split, whole)
    assert runs.logged(split, "eval_correct") == runs.logged(whole, "eval_correct")


@pytest.mark.ranks(4)
def test_what_trl_sets_by_itself(tmp_path: Path) -> None:
    """Autocast to bfloat16, and gradient checkpointing, with adapters."""
    options: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "batch": 4}
    options |= {"model_options": {"dtype": torch.float32}, "peft_config": peft.LoraConfig(**LORA)}
    with runs.alone():
        whole = run(tmp_path / "whole", **options)
    split = run(tmp_path / "split", plait.DistributedConfig(**LAYOUTS[4][0]), ranks=2, **options)
    for name, close in {"loss": 5e-3, "grad_norm": 5e-2, "entropy": 5e-3}.items():
        ours, theirs = runs.logged(split, name), runs.logged(whole, name)
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=close), name


@pytest.mark.ranks(2)
def test_tokens_that_are_counted_on_a_rank_alone_are_noticed(tmp_path: Path) -> None:
    def compare() -> None:
        options = {"batch": 4, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        same(*both(tmp_path, {"dp_shard_size": 2}, 2, eval_dataset=data(5), **options))

    compare()
    with mutation.must_fail(sft, "weighed", lambda loss, *_, **__: loss):
        compare()


@pytest.mark.ranks(2)
def test_what_a_split_model_does_not_do(tmp_path: Path) -> None:
    config = plait.DistributedConfig(tp_size=2)
    with pytest.raises(PlaitError, match="activation_offloading=True"):
        run(tmp_path, config, activation_offloading=True)
    with pytest.raises(PlaitError, match="use_liger_kernel=True"):
        run(tmp_path, config, use_liger_kernel=True)
    model = runs.model(config)
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
    with pytest.raises(PlaitError, match="DPOTrainer with a split model"):
        trl.DPOTrainer(
            model=model, ref_model=None, args=args, processing_class=byte_tokenizer(),
            train_dataset=datasets.Dataset.from_list(pairs),
            peft_config=peft.LoraConfig(**LORA),
        )  # fmt: skip
