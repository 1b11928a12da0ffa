"""Proofs of derived rules: what is remembered, what they cover, and what all ranks hear of them."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.build import proven
from plait.build.names import names_of
from plait.build.rules import DerivedPlan, Rules, rules_for, user_rules
from plait.errors import PlanError, RankError
from plait.hf.small.heads import hard_heads
from plait.plan.heads import head_map
from plait.proof import numbers, tokens
from plait.state import state_of
from plait.testing import tiny

BATCH = {"x": torch.linspace(-1, 1, 64).reshape(4, 16)}


class Block(nn.Module):
    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.wrong = nn.Linear(16, 40), nn.Linear(40, 16), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.up(x)
        if self.wrong:  # reads the whole width, which a name does not tell
            middle = middle / (1 + middle.abs().amax(-1, keepdim=True))
        return x + self.down(torch.relu(middle))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = Block(), Block(wrong=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.text(x) + (0 if y is None else self.vision(y))


def forget(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is remembered, and no class is known; where a file would be kept."""
    monkeypatch.setattr(proven, "_table", lambda: {"transformers": "0.0", "classes": []})
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setattr(proven, "_file", lambda key: folder / f"{key}.json")
    proven._VERDICTS.clear()
    return folder


def config() -> plait.DistributedConfig:
    return plait.DistributedConfig(tp_size=torch.distributed.get_world_size())


def made(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


@pytest.mark.ranks(2)
def test_a_second_module_of_a_class_is_proven_by_itself() -> None:
    proven._VERDICTS.clear()
    plait.parallelize(made(Block), config(), check=BATCH)
    with pytest.raises(PlanError, match="Block differs, split and whole, first in"):
        plait.parallelize(made(Block, wrong=True), config(), check=BATCH)
    plait.parallelize(made(Block), config(), check=BATCH)
    assert not proven._VERDICTS


@pytest.mark.ranks(2)
def test_a_corrected_batch_is_tried_again() -> None:
    with pytest.raises(PlanError, match="Block could not be compared: the whole model") as caught:
        plait.parallelize(made(Block), config(), check={"y": BATCH["x"]})
    assert str(caught.value).count("Ways out") == 1
    with pytest.raises(PlanError, match="a small copy could not be compared: only models of"):
        plait.parallelize(made(Block), config())
    plait.parallelize(made(Block), config(), check=BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["numbers", "making"])
def test_a_failure_on_one_rank_is_everyones(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(Block)
    if torch.distributed.get_rank() == 1 and where == "numbers":
        with torch.no_grad():
            module.up.weight[0, 0] = float("nan")  # type: ignore[union-attr, operator]
    if torch.distributed.get_rank() == 1 and where == "making":
        monkeypatch.setattr(proven, "_double", lambda module: 1 / 0)
    with pytest.raises(PlanError, match="gives NaN" if where == "numbers" else "ZeroDivision"):
        plait.parallelize(module, config(), check=BATCH)
    monkeypatch.undo()
    plait.parallelize(made(Block), config(), check=BATCH)


@pytest.mark.ranks(2)
def test_a_broken_rule_of_the_users_is_not_a_mistake_of_the_derived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    broken = {"model.layers.*.mlp.down_proj": "replicate"}
    for tp_plan in (broken, "auto"):
        split = plait.parallelize(tiny.model("phi3"), config(), tp_plan)
        state = state_of(split)
        assert state is not None and "colwise_qkv" in state.plan.by_style()
    assert [verdict.wrong for verdict in proven._VERDICTS.values()] == [""]


@pytest.mark.ranks(2)
def test_only_verdicts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = forget(monkeypatch)

    def fails(*args: Any, **options: Any) -> Any:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr("plait.proof.prove", fails)
        plait.parallelize(tiny.model("phi3"), config())
    assert not proven._VERDICTS and not list(folder.rglob("*.json"))
    split = plait.parallelize(tiny.model("phi3"), config())
    assert "colwise_qkv" in state_of(split).plan.by_style()  # type: ignore[union-attr]
    if torch.distributed.get_rank() == 0:
        (file,) = folder.rglob("*.json")
        assert json.loads(file.read_text()) == {"wrong": "", "unreached": []}


@pytest.mark.ranks(2)
def test_what_the_batch_does_not_reach_is_refused() -> None:
    with pytest.raises(PlanError, match=r"does not reach vision\.up, vision\.down"):
        plait.parallelize(made(Towers), config(), check=BATCH)
    with pytest.raises(PlanError, match=r"first in vision"):
        plait.parallelize(made(Towers), config(), check=BATCH | {"y": BATCH["x"]})


@pytest.mark.ranks(2)
def test_a_tower_that_the_small_copy_does_not_reach_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from plait.hf import small

    forget(monkeypatch)
    whole = small.example_batch
    text = ("input_ids", "labels")
    monkeypatch.setattr(
        small, "example_batch", lambda m: {n: x for n, x in whole(m).items() if n in text}
    )
    split = plait.parallelize(tiny.model("llava"), config())
    state = state_of(split)
    assert state is not None
    names = [entry.name for entry in state.plan.entries]
    assert any("language_model" in name for name in names)
    assert not any("vision_tower" in name for name in names)
    first = next(iter(proven._VERDICTS.values()))
    assert any("vision_tower" in name for name in first.unreached)


@pytest.mark.ranks(2)
def test_a_generate_that_raises_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    proper = tokens._generate

    def generate(error: Exception) -> Any:
        def run(model: Any, inputs: Any) -> torch.Tensor:
            if state_of(model) is not None:
                raise error
            return proper(model, inputs)

        return run

    monkeypatch.setattr(tokens, "_generate", generate(KeyError("no such cache")))
    module = tiny.model("phi3")
    rules = rules_for(module, names_of(module), "auto")
    assert rules.derived
    plait.parallelize(module, config())
    (verdict,) = proven._VERDICTS.values()
    assert re.search(r"generate\(\) fails: KeyError: 'no such cache'", verdict.wrong)
    proven._VERDICTS.clear()
    monkeypatch.setattr(tokens, "_generate", generate(RankError("Waiting:", "nobody came")))
    module = tiny.model("phi3", hidden_size=192)
    plait.parallelize(module, config())
    assert not proven._VERDICTS, "that the ranks did not meet is no difference"


@pytest.mark.ranks(1)
def test_a_derived_plan_that_was_changed_is_the_users() -> None:
    block = made(Block)
    plan = plait.derive_plan(block)
    assert user_rules(plan) is None and rules_for(block, names_of(block), plan).is_own
    assert type(plan | {}) is dict
    plan["down"] = "replicate"
    assert plan.is_changed and user_rules(plan) == dict(plan)
    assert not rules_for(block, names_of(block), plan).derived
    other = DerivedPlan({"up": "colwise"}, {})
    assert not rules_for(block, names_of(block), other).is_own


@pytest.mark.ranks(1)
def test_the_table_is_of_classes_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    listed = {"transformers": metadata.version("transformers"), "classes": ["Phi3ForCausalLM"]}
    monkeypatch.setattr(proven, "_table", lambda: listed)
    real = type(tiny.model("phi3"))
    assert proven._is_in_table(real)
    assert not proven._is_in_table(type("Phi3ForCausalLM", (real,), {"__module__": "mine"}))


LAYOUTS = [(9, 3, 2), (25, 5, 2), (32, 8, 3), (14, 2, 4), (71, 1, 2), (32, 8, 2), (32, 32, 8)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("heads", "kv", "ranks"), LAYOUTS)
def test_a_small_copy_has_the_heads_of_the_original(heads: int, kv: int, ranks: int) -> None:
    from transformers import LlamaConfig

    from plait.hf.small import small_config

    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 8 * heads}
    original = LlamaConfig(**sizes)
    q, k = hard_heads(original, ranks)
    small = small_config(original, heads=q, kv_heads=k)
    maps = [
        head_map(c.num_attention_heads, c.num_key_value_heads, ranks) for c in (original, small)
    ]
    assert small.num_attention_heads <= 16

    def hard(found: Any) -> tuple[bool, ...]:
        uneven = len({len(q) for q in found.query}) > 1
        padded = any(len(found.places(r)) > len(found.query[r]) for r in range(ranks))
        return found.is_shared, padded, uneven, found.num_kv_heads == 1

    assert hard(maps[0]) == hard(maps[1])


@pytest.mark.ranks(1)
def test_half_a_part_is_not_left_out() -> None:
    rules = Rules({}, {"v.0.attn.q": "colwise", "v.1.attn.o": "rowwise", "v.0.mlp.up": "colwise"})
    left = rules.without({"v.*.attn.q"}, "why")
    assert set(left.derived) == {"v.0.mlp.up"} and not left.is_own
    assert set(left.whole) == {"v.0.attn.q", "v.1.attn.o"}


@pytest.mark.ranks(1)
def test_every_output_counts_where_there_is_no_loss() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    outputs = {"logits": x, "pooled": 2 * x[0], "attentions[0]": x, "mask": torch.ones(2)}
    expected = numbers.weighted(outputs["logits"], 0) + numbers.weighted(outputs["pooled"], 1)
    assert torch.equal(numbers.loss_of(outputs), expected)
    assert numbers.loss_of({"loss": x.sum(), "logits": x}) == 6
