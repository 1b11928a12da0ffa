"""Configs through dicts, JSON, YAML and the environment, and back."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.layout import DistributedConfig, ParallelismConfig, SequenceParallelConfig
from plait.layout.axes import SIZE_FIELDS
from plait.layout.config import (
    ATTENTION_IMPLEMENTATIONS,
    CP_BACKENDS,
    EP_IMPLEMENTATIONS,
    SP_BACKENDS,
)

sizes = st.integers(1, 64)
plans = st.none() | st.just("auto") | st.dictionaries(st.text(), st.text(), max_size=3)
handlers = st.none() | st.builds(
    SequenceParallelConfig,
    sp_seq_length=sizes,
    sp_seq_length_is_variable=st.booleans(),
    sp_attn_implementation=st.none() | st.sampled_from(ATTENTION_IMPLEMENTATIONS),
)
parallelism = {
    **dict.fromkeys(SIZE_FIELDS, sizes),
    "tp_size": st.none() | sizes,
    "cp_backend": st.sampled_from(CP_BACKENDS),
    "sp_backend": st.sampled_from(SP_BACKENDS),
    "sp_handler": handlers,
}
distributed = {
    **parallelism,
    "tp_plan": plans,
    "ep_plan": plans,
    "fsdp_plan": plans,
    "enable_sequence_parallel": st.booleans(),
    "fsdp_cpu_offload": st.booleans(),
    "fsdp_mixed_precision": st.booleans(),
    "ep_implementation": st.sampled_from(EP_IMPLEMENTATIONS),
}
configs = st.builds(ParallelismConfig, **parallelism) | st.builds(DistributedConfig, **distributed)


@given(configs)
def test_round_trips(config):
    cls = type(config)
    assert cls.from_dict(config.to_dict()) == config
    assert cls.from_json(config.to_json()) == config
    assert cls.from_yaml(config.to_yaml()) == config
    assert json.loads(config.to_json()) == config.to_dict()


def refusal(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def test_unknown_fields_suggest_names():
    text = refusal(
        lambda: DistributedConfig.from_dict(
            {"tp_sise": 2, "zzz": 1, "sp_handler": {"sp_seq_lenght": 4}}
        )
    )
    assert "no field tp_sise (nearest: tp_size" in text
    assert "no field zzz\n" in text
    assert "no field sp_handler.sp_seq_lenght (nearest: sp_seq_length" in text
    assert "tp_plan" in refusal(lambda: ParallelismConfig.from_dict({"tp_plan": "auto"}))
    assert "must be a mapping" in refusal(lambda: ParallelismConfig.from_dict([1]))


def test_partial_dict_keeps_defaults():
    assert ParallelismConfig.from_dict({"tp_size": 2}) == ParallelismConfig(tp_size=2)
    assert ParallelismConfig.from_dict({}) == ParallelismConfig()


def test_files(tmp_path):
    config = DistributedConfig(tp_size=3, tp_plan={"a.*": "colwise"})
    for name, text in (
        ("a.json", config.to_json()),
        ("a.yaml", config.to_yaml()),
        ("a.yml", config.to_yaml()),
    ):
        (tmp_path / name).write_text(text)
        assert DistributedConfig.from_file(tmp_path / name) == config
        assert DistributedConfig.from_file(str(tmp_path / name)) == config


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.toml", "", ".json, .yaml or .yml"),
        ("a.json", "3", "must be a mapping"),
        ("a.yaml", "parallelism_config: 3", "parallelism_config must be a mapping"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, part):
    path = tmp_path / name
    path.write_text(text)
    assert part in refusal(lambda: ParallelismConfig.from_file(path))


def test_absent_and_binary_files(tmp_path):
    assert "cannot be read" in refusal(lambda: ParallelismConfig.from_file(tmp_path / "no.json"))
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(lambda: ParallelismConfig.from_file(tmp_path / "b.json"))


def test_block_of_an_accelerate_file():
    text = """
compute_environment: LOCAL_MACHINE
num_processes: 8
parallelism_config:
  parallelism_config_cp_backend: torch
  parallelism_config_cp_comm_strategy: allgather
  parallelism_config_dp_replicate_size: 2
  parallelism_config_sp_size: 4
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length: 256
  parallelism_config_sp_seq_length_is_variable: false
  parallelism_config_sp_attn_implementation: sdpa
  parallelism_config_tp_size: 1
"""
    assert ParallelismConfig.from_yaml(text) == ParallelismConfig(
        cp_backend="torch",
        dp_replicate_size=2,
        sp_size=4,
        sp_backend="deepspeed",
        sp_handler=SequenceParallelConfig(
            sp_seq_length=256, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
        ),
        tp_size=1,
    )


def environment(**values):
    return {f"PARALLELISM_CONFIG_{name}": value for name, value in values.items()}


def test_environment():
    values = environment(
        SP_SIZE="2",
        SP_BACKEND="deepspeed",
        SP_SEQ_LENGTH="128",
        SP_SEQ_LENGTH_IS_VARIABLE="False",
        SP_ATTN_IMPLEMENTATION="sdpa",
        DP_REPLICATE_SIZE="2",
        DP_SHARD_SIZE="3",
        TP_SIZE=" 4 ",
        CP_SIZE="5",
        CP_BACKEND="torch",
        CP_COMM_STRATEGY="alltoall",
    )
    assert DistributedConfig.from_env({**values, "TP_SIZE": "9"}) == DistributedConfig(
        sp_size=2,
        sp_backend="deepspeed",
        sp_handler=SequenceParallelConfig(
            sp_seq_length=128, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
        ),
        dp_replicate_size=2,
        dp_shard_size=3,
        tp_size=4,
        cp_size=5,
        cp_backend="torch",
    )


def test_this_process_environment(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "")
    assert ParallelismConfig.from_env() == ParallelismConfig(tp_size=2)


def test_bad_variables_are_all_named():
    text = refusal(
        lambda: ParallelismConfig.from_env(
            environment(
                TP_SIZE="two", CP_SISE="2", SP_SEQ_LENGTH_IS_VARIABLE="maybe", SP_SIZE="1.5"
            )
        )
    )
    assert "PARALLELISM_CONFIG_TP_SIZE='two' is not an integer" in text
    assert "PARALLELISM_CONFIG_SP_SIZE='1.5' is not an integer" in text
    assert "PARALLELISM_CONFIG_CP_SISE (nearest: PARALLELISM_CONFIG_CP_SIZE" in text
    assert "'maybe' is not one of" in text
    assert "at least 1" in refusal(lambda: ParallelismConfig.from_env(environment(TP_SIZE="0")))


def test_layout_knows_no_torch():
    code = (
        "import plait.layout, sys; assert not {'torch', 'yaml', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
