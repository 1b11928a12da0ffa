"""The groups of sharded data parallelism, as data."""

import pytest
from torch import nn

from plait.build.names import names_of
from plait.build.sharding import groups_for, shipped
from plait.errors import PlanError
from plait.layout import DistributedConfig
from plait.plan.shards import FREE, KEEP, blocks_of, shard_groups
from plait.testing import tiny


def test_layers_embedding_and_head_are_groups_inner_ones_first():
    model = tiny.model("llama")
    groups = groups_for(model, DistributedConfig())
    assert {g.name: g.style for g in groups} == {
        "model.layers.0": FREE,
        "model.layers.1": FREE,
        "model.embed_tokens": FREE,
        "lm_head": KEEP,
    }
    depths = [g.name.count(".") for g in groups]
    assert depths == sorted(depths, reverse=True)


def test_tied_ends_belong_to_the_root():
    names = {g.name for g in groups_for(tiny.model("gemma3_text"), DistributedConfig())}
    assert names == {"model.layers.0", "model.layers.1"}


def test_the_outermost_lists_are_the_layers():
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.pool = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    assert blocks_of(names_of(model)) == ["layers.0", "layers.1", "pool.1"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


def test_of_lists_of_lists_the_inner_members_are_the_layers():
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))
    expected = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert blocks_of(names_of(model)) == expected


def test_a_layer_that_shares_a_parameter_is_the_roots():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.layers[2].weight = model.layers[0].weight
    names = names_of(model)
    assert [g.name for g in shard_groups(names)] == ["layers.1"]
    with pytest.raises(PlanError, match="is the same parameter as"):
        shard_groups(names, {"layers.*": FREE})


def test_rules_replace_and_join_the_default_ones():
    model = tiny.model("qwen2")
    rules = {"layers.*": KEEP, "model.layers.*.mlp": FREE, "lm_head": "root"}
    groups = groups_for(model, DistributedConfig(fsdp_plan=rules))
    found = {g.name: g.style for g in groups}
    assert found["model.layers.0"] == KEEP
    assert found["model.layers.1.mlp"] == FREE
    assert "lm_head" not in found
    assert "model.embed_tokens" in found


def test_the_shipped_plan():
    model = tiny.model("llama")
    rules = shipped(model)
    assert rules["model.layers.*"] == FREE
    assert rules["lm_head"] == KEEP
    found = {g.name for g in groups_for(model, DistributedConfig(fsdp_plan="model"))}
    assert "model.norm" in found


def test_all_problems_of_a_plan_are_listed():
    with pytest.raises(PlanError) as found:
        shard_groups(names_of(tiny.model("llama")), {"layer.*": FREE, "lm_head": "kept"})
    text = str(found.value)
    assert "'layer.*' matches no module; closest names: " in text
    assert "unknown style 'kept'; closest: keep_full_weight" in text
