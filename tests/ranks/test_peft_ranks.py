"""Adapters as PEFT makes them by default on half-precision models, and ranks that differ."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import plait
from plait.errors import PlaitError, RankError
from plait.hf.peft import intercept
from plait.testing import add_noise, mutation, tiny
from tests.ranks import trainer_runs as runs
from tests.ranks.test_peft import ATTENTION, MODELS, own_part, tokens

peft = pytest.importorskip("peft")

HALF = {
    "llama": ("llama", MODELS["llama"][1], [*ATTENTION, "up_proj", "down_proj"]),
    "phi3": ("phi3", {"num_attention_heads": 6, "num_key_value_heads": 2}, ["qkv_proj", "o_proj"]),
}
"""Heads that do not divide; fused weights, whose parts are of equal sizes in another order."""


def shared(path: Path) -> Path:
    found = [path]
    dist.broadcast_object_list(found)
    return found[0]


def halves(name: str, sizes: dict[str, int]) -> tuple[Any, Any, Any]:
    kind, fields, names = HALF[name]
    whole = add_noise(tiny.model(kind, dtype=torch.bfloat16, **fields)).train()
    bare = plait.parallelize(copy.deepcopy(whole), plait.DistributedConfig(**sizes))
    split = plait.parallelize(copy.deepcopy(whole), plait.DistributedConfig(**sizes))
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    around = [peft.get_peft_model(m, copy.deepcopy(config)) for m in (split, whole)]
    around[0].load_state_dict(around[1].state_dict())
    return around[0], around[1], bare


def check(name: str, sizes: dict[str, int], folder: Path) -> None:
    split, whole, bare = halves(name, sizes)
    found, expected = plait.full_state_dict(split), whole.state_dict()
    for key, x in expected.items():
        assert found[key].dtype == x.dtype and torch.equal(found[key], x), key
    split.save_pretrained(folder / name)
    written = load_file(folder / name / "adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(whole)
    assert all(torch.equal(written[key], x) for key, x in wanted.items())
    again = plait.full_state_dict(peft.PeftModel.from_pretrained(bare, folder / name))
    for key, x in expected.items():
        assert torch.equal(again[key], x), key
    ids = tokens(0)
    mine, all_of_them = own_part(split, ids), ids
    split(input_ids=mine, labels=mine).loss.backward()
    whole(input_ids=all_of_them, labels=all_of_them).loss.backward()
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            limit = 0.05 * param.grad.abs().max() + 1e-4
            assert (grads[key] - param.grad).abs().max() < limit, key


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", HALF)
def test_factors_that_peft_casts(name: str, world_size: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    layouts = [{"tp_size": 2}, {"dp_shard_size": 2}]
    if world_size == 4:
        layouts = [{"tp_size": 2, "dp_shard_size": 2}]
    for number, sizes in enumerate(layouts):
        check(name, sizes, folder / str(number))


@pytest.mark.ranks(2)
def test_a_cast_that_forgets_where_factors_lie_is_noticed(tmp_path: Path) -> None:
    folder = shared(tmp_path)

    with mutation.must_fail(intercept, "_carry_notes", lambda *_: False, raises=Exception):
        check("phi3", {"tp_size": 2}, folder)


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_an_error_on_all(tmp_path: Path, rank: int) -> None:
    folder, begin = shared(tmp_path), time.monotonic()
    sizes = plait.DistributedConfig(tp_size=2)

    def model() -> Any:
        return plait.parallelize(add_noise(tiny.model("llama")), sizes)

    split = model()
    with pytest.raises(RankError, match="lora_alpha"):
        peft.get_peft_model(split, peft.LoraConfig(target_modules=ATTENTION, lora_alpha=8 + rank))
    for number in range(2):
        config = peft.LoraConfig(target_modules=ATTENTION, init_lora_weights=False)
        torch.manual_seed(number)
        peft.get_peft_model(model(), config).save_pretrained(folder / f"adapter {number}")
    with pytest.raises(RankError, match=r"An adapter's weights"):
        peft.PeftModel.from_pretrained(model(), folder / f"adapter {rank}")
    with pytest.raises((RankError, ValueError), match=r"adapter_config.json|rank 1"):
        peft.PeftModel.from_pretrained(model(), folder / ("adapter 0" if rank == 0 else "nowhere"))
    assert time.monotonic() - begin < 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["learning_rate", "seed", "gradient_accumulation_steps"])
def test_arguments_of_a_trainer_that_differ(name: str, tmp_path: Path, rank: int) -> None:
    model = runs.model()
    plait.parallelize(model, plait.DistributedConfig(tp_size=2))
    values = {"learning_rate": 0.1 + rank, "seed": rank, "gradient_accumulation_steps": 1 + rank}
    with pytest.raises(PlaitError, match=f"the ranks have different {name}"):
        runs.trainer(tmp_path, model, **{name: values[name]})
