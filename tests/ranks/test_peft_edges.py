"""Adapters where tokens are split, weights tied or outputs gathered: right, or refused by name."""

import copy
from typing import Any

import pytest
import torch.distributed as dist

import plait
from plait.errors import PlaitError, PlanError
from plait.styles import sequence_params
from plait.testing import add_noise, mutation, tiny
from tests.ranks.test_peft import ATTENTION, MODELS, adapted, pair, train

peft = pytest.importorskip("peft")

SEQUENCE = {"enable_sequence_parallel": True}
BESIDE: dict[str, dict[str, Any]] = {
    "saved norms": {"modules_to_save": ["input_layernorm", "norm"]},
    "dora": {"use_dora": True},
}
"""What acts on tokens that a rank holds a part of."""


def beside(kind: str, before: bool = False) -> None:
    layout = {"tp_size": dist.get_world_size(), **SEQUENCE}
    lora = {"target_modules": [*ATTENTION, "up_proj", "down_proj"], **BESIDE[kind]}
    if not before:
        train(*pair("llama", layout, **lora), steps=2)
        return
    whole: Any = add_noise(tiny.model("llama", **MODELS["llama"][1])).train()
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **lora)
    whole = peft.get_peft_model(whole, config, autocast_adapter_dtype=False)
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(**layout))
    train(split, whole, steps=2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_parameters_that_see_some_tokens(kind: str, before: bool) -> None:
    beside(kind, before)


@pytest.mark.ranks(2)
def test_gradients_that_are_not_summed_are_noticed() -> None:
    for name, kind in (("follow_copied", "saved norms"), ("follow_tokens", "dora")):
        from plait.hf.peft import layers, saved_modules

        where = saved_modules if name == "follow_copied" else layers
        assert hasattr(sequence_params, name)
        with mutation.must_fail(where, name, lambda *unused: None):
            beside(kind)


def refused(match: str, name: str, error: type[Exception], **lora: Any) -> None:
    """After the split nothing is left behind, and the next adapter works."""
    split = plait.parallelize(
        add_noise(tiny.model("llama", **MODELS[name][1])).train(),
        plait.DistributedConfig(tp_size=dist.get_world_size()),
    )
    kind = lora.pop("kind", peft.LoraConfig)
    with pytest.raises(error, match=match):
        peft.get_peft_model(split, kind(task_type="CAUSAL_LM", **lora))
    whole = add_noise(tiny.model("llama", **MODELS[name][1])).train()
    train(*adapted(split, whole, {"target_modules": ATTENTION}), steps=1)


@pytest.mark.ranks(2)
def test_what_cannot_be_right_is_refused_by_name() -> None:
    refused(
        "target_parameters reach", "llama", PlanError,
        target_parameters=["q_proj.weight"], target_modules=[],
    )  # fmt: skip
    refused(
        "ensure_weight_tying", "tied", PlaitError,
        target_modules=["embed_tokens"], ensure_weight_tying=True,
    )  # fmt: skip
    refused(
        "its output is gathered", "llama", PlanError,
        kind=peft.IA3Config, target_modules=["k_proj", "lm_head"], feedforward_modules=[],
    )  # fmt: skip
    tied: Any = add_noise(tiny.model("llama", **MODELS["tied"][1]))
    config = peft.LoraConfig(
        modules_to_save=["embed_tokens"], target_modules=ATTENTION, ensure_weight_tying=True
    )
    around = peft.get_peft_model(tied, config)
    with pytest.raises(PlaitError, match="ensure_weight_tying"):
        plait.parallelize(around, plait.DistributedConfig(tp_size=2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}], ids=str)
def test_other_kinds_are_refused_before_anything_is_changed(layout: dict[str, int]) -> None:
    whole: Any = add_noise(tiny.model("llama", **MODELS["llama"][1])).train()
    split = plait.parallelize(copy.deepcopy(whole), plait.DistributedConfig(**layout))
    names = ["q_proj", "down_proj"]
    for config, match in (
        (peft.LoHaConfig(target_modules=names), "LOHA"),
        (peft.LNTuningConfig(target_modules=["norm"]), "LN_TUNING"),
        (peft.OSFConfig(target_modules=["q_proj"]), "OSF"),
        (peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1), "ADAPTION_PROMPT"),
        (peft.LoraConfig(target_modules=names, init_lora_weights="eva"), "eva"),
        (peft.LoraConfig(target_modules=names, layer_replication=[(0, 2), (1, 2)]), "replication"),
    ):
        with pytest.raises(PlaitError, match=match):
            peft.get_peft_model(split, config)
        before = copy.deepcopy(whole)
        around = peft.get_peft_model(before, config) if match != "eva" else None
        if around is not None:
            with pytest.raises(PlaitError, match=match):
                plait.parallelize(around, plait.DistributedConfig(**layout))
    train(*adapted(split, whole, {"target_modules": ATTENTION}), steps=1)
