"""Adapters of PEFT in a Trainer: curves, files and a resumption as in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import plait
from plait.proof.numbers import exact
from tests.ranks import trainer_runs as runs
from tests.ranks.test_trainer import same
from tests.ranks.test_trainer_checkpoints import shared

pytest.importorskip("wrapt")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

LAYOUTS = {2: {"tp_size": 2}, 4: {"tp_size": 2, "dp_shard_size": 2}}
FILE = "adapter_model.safetensors"


def adapted(split: Any = None) -> Any:
    """A small model with an adapter, whose second factors are not zero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    )
    made = peft.get_peft_model(runs.model(split), config)
    generator = torch.Generator().manual_seed(1)
    whole = plait.full_state_dict(made) if split is not None else made.state_dict()
    factors = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) / 8
        for name, value in sorted(whole.items())
        if "lora_" in name
    }
    made.load_state_dict(factors, strict=False)
    return made


def trained(folder: Path, split: Any = None, *, ranks: int = 1, start: Any = None) -> Any:
    made = runs.trainer(
        folder, adapted(split), max_steps=6, learning_rate=1e-2, save_strategy="steps",
        save_steps=4, per_device_train_batch_size=6 // ranks,
    )  # fmt: skip
    made.train(resume_from_checkpoint=start)
    made.save_model(str(folder / "final"))
    return made


@pytest.mark.wide_ranks(4)
@pytest.mark.ranks(2, 4)
def test_curves_files_and_a_resumption(world_size: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    layout = LAYOUTS[world_size]
    config, ranks = plait.DistributedConfig(**layout), layout.get("dp_shard_size", 1)
    with exact():
        with runs.alone():
            whole = trained(folder / f"whole {dist.get_rank()}")
        split = trained(folder / "split", config, ranks=ranks)
        same(split, whole)
        dist.barrier()  # transformers writes on the first rank only
        ours, theirs = (folder / name / "final" for name in ("split", "whole 0"))
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        files = load_file(ours / FILE), load_file(theirs / FILE)
        assert files[0].keys() == files[1].keys()
        for name, value in files[0].items():
            torch.testing.assert_close(value, files[1][name], rtol=1e-9, atol=1e-9)
        settings = [json.loads((at / "adapter_config.json").read_text()) for at in (ours, theirs)]
        for made in settings:
            made["target_modules"].sort()
        assert settings[0] == settings[1]
        for start in ("split", "whole 0"):
            saved = str(folder / start / "checkpoint-4")
            same(trained(folder / f"from {start}", config, ranks=ranks, start=saved), whole)
        with runs.alone():
            saved = str(folder / "split" / "checkpoint-4")
            same_weights(trained(folder / f"back {dist.get_rank()}", start=saved), whole)
    with runs.alone():
        loaded = peft.PeftModel.from_pretrained(runs.model(), ours)
        batch = {name: x[None] for name, x in runs.samples(1)[0].items()}
        with torch.no_grad():
            expected = whole.model.eval()(**batch).logits
            torch.testing.assert_close(loaded.eval()(**batch).logits, expected)


def same_weights(first: Any, second: Any) -> None:
    state = second.model.state_dict()
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
