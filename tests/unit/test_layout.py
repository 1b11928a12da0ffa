"""Sizes: types and ranges, the arithmetic against WORLD_SIZE, and what is refused by name."""

import copy
import dataclasses
import logging
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.layout import (
    AXES,
    UNBUILT,
    DeepSpeedSequenceParallelConfig,
    DistributedConfig,
    Layout,
    ParallelismConfig,
    SequenceParallelConfig,
)
from plait.layout import axes as axes_module
from plait.layout.axes import SIZE_FIELDS

sizes = st.integers(1, 8)


@pytest.fixture
def all_built(monkeypatch):
    """As if every feature existed: the arithmetic alone decides."""
    monkeypatch.setattr("plait.layout.arithmetic.UNBUILT", {})


def refusal(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def test_defaults_are_single():
    for config in (ParallelismConfig(), DistributedConfig()):
        for world_size in (None, 1, 4):
            layout = config.resolve(world_size)
            assert layout.is_single
            assert layout.world_size == layout.tp_size == layout.ep == 1


def test_tp_alone():
    layout = ParallelismConfig(tp_size=4).resolve(4)
    assert layout.sizes == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 4}
    assert tuple(layout.sizes) == AXES
    assert (layout.world_size, layout.tp_size, layout.is_single) == (4, 4, False)
    assert str(layout) == "tp 4"


@pytest.mark.parametrize("plan", ["auto", {}, {"layers.*.q_proj": "colwise"}])
def test_a_plan_without_a_size_takes_all_ranks(plan):
    assert DistributedConfig(tp_plan=plan).resolve(3).tp_size == 3
    assert DistributedConfig(tp_plan=plan).resolve(1).is_single
    assert DistributedConfig(tp_plan=plan, tp_size=2).resolve(2).tp_size == 2


@pytest.mark.usefixtures("all_built")
def test_a_plan_without_a_size_takes_what_is_left():
    layout = DistributedConfig(tp_plan="auto", dp_shard_size=2, cp_size=3).resolve(24)
    assert layout.tp_size == 4
    text = refusal(lambda: DistributedConfig(tp_plan="auto", dp_shard_size=4).resolve(6))
    assert "dp_shard 4" in text
    assert "6 is not divisible by 4" in text


@pytest.mark.usefixtures("all_built")
def test_product_is_shown():
    text = refusal(lambda: ParallelismConfig(dp_shard_size=2, tp_size=4).resolve(6))
    assert "dp_shard 2 × tp 4 = 8, but WORLD_SIZE is 6." in text
    assert "start 8 processes" in text
    assert "set tp_size=3" in text


def test_ways_out_name_only_what_is_built(monkeypatch):
    text = refusal(lambda: ParallelismConfig(tp_size=2).resolve(4))
    assert "tp 2 alone, but WORLD_SIZE is 4." in text
    assert "start 2 processes" in text
    assert "set tp_size=4" in text
    assert "set dp_shard_size=2" in text
    monkeypatch.setattr("plait.layout.arithmetic.UNBUILT", {"dp_shard_size": "sharding"})
    text = refusal(lambda: ParallelismConfig(tp_size=2).resolve(4))
    assert "dp_shard_size" not in text


def test_no_launcher_is_a_no_op_with_a_line(caplog):
    caplog.set_level(logging.WARNING, "plait")
    assert DistributedConfig(tp_size=2).resolve(None).is_single
    assert "tp 2" in caplog.text
    assert "torchrun --nproc-per-node 2" in caplog.text
    caplog.clear()
    assert DistributedConfig(tp_plan="auto").resolve(None).is_single
    assert ParallelismConfig(dp_shard_size=2).resolve(None).is_single
    assert "dp_shard 2" in caplog.text


@pytest.mark.parametrize("name", [name for name in SIZE_FIELDS if name in UNBUILT])
def test_unbuilt_sizes_are_refused_by_name(name):
    text = refusal(lambda: ParallelismConfig(**{name: 2, "tp_size": 2}).resolve(4))
    assert f"{name}=2: {UNBUILT[name]} is not built" in text


@pytest.mark.parametrize("name", ["dp_replicate_size", "dp_shard_size", "fsdp_size"])
def test_data_axes_are_factors_of_the_world(name):
    layout = ParallelismConfig(**{name: 2, "tp_size": 2}).resolve(4)
    axis = "dp_replicate" if name == "dp_replicate_size" else "dp_shard"
    assert layout.sizes[axis] == 2
    assert layout.tp_size == 2


def test_precisions_of_sharded_parameters():
    assert DistributedConfig(fsdp_mixed_precision="bf16").fsdp_mixed_precision == "bf16"
    text = refusal(lambda: DistributedConfig(fsdp_mixed_precision="bf61"))
    assert "fsdp_mixed_precision must be one of bf16" in text
    assert "nearest: bf16" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ep_plan", {}),
        ("ep_implementation", "all_to_all"),
    ],
)
def test_unbuilt_switches_are_refused_by_name(name, value):
    text = refusal(lambda: DistributedConfig(**{name: value}, tp_size=2).resolve(2))
    assert f"{name}={value!r}: {UNBUILT[name]} is not built" in text
    assert f"leave out {name}\n" in text


def test_unbuilt_fields_at_their_defaults_are_accepted():
    config = DistributedConfig(
        tp_size=2, cp_backend="torch", sp_backend="deepspeed", ep_implementation="auto", sp_size=1
    )
    assert config.resolve(2).tp_size == 2


def test_all_unbuilt_and_the_arithmetic_in_one_message():
    text = refusal(
        lambda: DistributedConfig(sp_size=2, cp_size=3, ep_plan={}, tp_size=2).resolve(2)
    )
    for part in ("sp 2", "cp 3", "ep_plan", "= 12, but WORLD_SIZE is 2"):
        assert part in text


def test_every_unbuilt_line_names_a_field():
    names = {field.name for field in dataclasses.fields(DistributedConfig)}
    assert set(axes_module.UNBUILT) <= names


@pytest.mark.parametrize("name", [*SIZE_FIELDS, "fsdp_size"])
@pytest.mark.parametrize("value", [True, False, "2", 2.0, 0, -1, [2]])
def test_wrong_sizes_are_refused(name, value):
    text = refusal(lambda: ParallelismConfig(**{name: value}))
    assert ("dp_shard_size" if name == "fsdp_size" else name) in text
    assert repr(value) in text


def test_every_wrong_field_is_listed():
    text = refusal(
        lambda: DistributedConfig(
            tp_size="2",
            sp_size=0,
            cp_backend="rign",
            sp_backend="ulises",
            tp_plan="atuo",
            ep_plan={"a": 1},
            fsdp_cpu_offload=1,
            ep_implementation="all2all",
            sp_handler={"sp_seq_length": 4},
        )
    )
    for part in (
        "9 field(s)",
        "tp_size must be an int",
        "sp_size must be at least 1",
        "nearest: ring",
        "nearest: ulysses",
        "tp_plan must be None",
        "'a': 1",
        "fsdp_cpu_offload must be True or False",
        "ep_implementation must be one of",
        "sp_handler must be a SequenceParallelConfig",
    ):
        assert part in text


def test_sizes_may_be_left_unset_with_none():
    config = DistributedConfig(**dict.fromkeys([*SIZE_FIELDS, "cp_backend", "sp_backend"]))
    assert config == DistributedConfig()


def test_world_size_is_checked():
    for wrong in (0, -2):
        assert "WORLD_SIZE" in refusal(lambda wrong=wrong: ParallelismConfig().resolve(wrong))


def test_fsdp_size_is_another_name():
    config = DistributedConfig(fsdp_size=4)
    assert config.dp_shard_size == config.fsdp_size == 4
    assert (
        config
        == DistributedConfig(dp_shard_size=4)
        == DistributedConfig.from_dict({"fsdp_size": 4})
    )
    assert DistributedConfig(fsdp_size=4, dp_shard_size=4).fsdp_size == 4
    assert dataclasses.replace(config, dp_shard_size=2).fsdp_size == 2
    assert dataclasses.replace(config, tp_size=2).fsdp_size == 4
    assert DistributedConfig(dp_shard_size=config.fsdp_size).to_yaml() == config.to_yaml()
    assert "two names" in refusal(lambda: DistributedConfig(fsdp_size=4, dp_shard_size=2))


def test_configs_are_values():
    config = DistributedConfig(
        tp_size=2, tp_plan={"a": "colwise"}, sp_handler=SequenceParallelConfig(sp_seq_length=8)
    )
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tp_size = 4
    plan = {"a": "colwise"}
    config = DistributedConfig(tp_plan=plan)
    plan["b"] = "rowwise"
    assert config.tp_plan == {"a": "colwise"}


def test_sequence_parallel_settings():
    assert DeepSpeedSequenceParallelConfig(sp_seq_length=8).sp_seq_length == 8
    ParallelismConfig(
        sp_size=2, sp_backend="deepspeed", cp_backend="torch", sp_handler=SequenceParallelConfig()
    )
    assert "whole mask" in refusal(lambda: SequenceParallelConfig(sp_attn_implementation="eager"))
    assert "nearest: flash_attention_2" in refusal(
        lambda: SequenceParallelConfig(sp_attn_implementation="flash_attention2")
    )
    assert "needs a sp_seq_length" in refusal(
        lambda: SequenceParallelConfig(sp_seq_length_is_variable=False)
    )
    assert "sp_seq_length must be" in refusal(lambda: SequenceParallelConfig(sp_seq_length=0))


@pytest.mark.usefixtures("all_built")
def test_experts_divide_one_copy():
    assert ParallelismConfig(dp_replicate_size=3, dp_shard_size=4, ep_size=2).resolve(12).ep == 2
    text = refusal(lambda: ParallelismConfig(dp_replicate_size=3, tp_size=4, ep_size=3).resolve(12))
    assert "ep_size 3 does not divide the ranks of one copy, tp 4 = 4" in text


@given(
    st.fixed_dictionaries({f"{axis}_size": sizes for axis in AXES}),
    st.integers(1, 5000),
)
def test_resolved_exactly_when_the_product_fits(fields, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.layout.arithmetic.UNBUILT", {})
        config = ParallelismConfig(**fields)
        product = math.prod(fields.values())
        layout = config.resolve(product)
        assert layout.world_size == product
        assert {f"{axis}_size": size for axis, size in layout.sizes.items()} == fields
        if world_size != product and product > 1:
            text = refusal(lambda: config.resolve(world_size))
            assert str(product) in text
            assert str(world_size) in text


@given(
    st.fixed_dictionaries({f"{axis}_size": sizes for axis in AXES}),
    st.integers(1, 500),
)
def test_every_suggested_size_fits(fields, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.layout.arithmetic.UNBUILT", {})
        config = ParallelismConfig(**fields)
        try:
            config.resolve(world_size)
        except LayoutError as error:
            for way in error.ways_out:
                if way.startswith("set "):
                    name, _, size = way.removeprefix("set ").partition("=")
                    changed = dataclasses.replace(config, **{name: int(size)})
                    assert changed.resolve(world_size).world_size in (world_size, 1)
                else:
                    assert way.startswith(f"start {math.prod(fields.values())} processes")


@given(st.fixed_dictionaries({f"{axis}_size": sizes for axis in AXES[:-1]}), sizes)
def test_derived_tp_size_fills_the_world(fields, tp):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.layout.arithmetic.UNBUILT", {})
        world_size = math.prod(fields.values()) * tp
        assert DistributedConfig(**fields, tp_plan="auto").resolve(world_size).tp_size == tp


def test_layout_is_a_value():
    assert Layout({"tp": 2}) == Layout({"tp": 2})
    assert str(Layout({"dp_shard": 2, "cp": 1, "tp": 2})) == "dp_shard 2 × tp 2"
    assert str(Layout({"tp": 1})) == "one process"
