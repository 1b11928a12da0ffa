"""`plait check` and `plait verify`: what they print, and their exit codes."""

import json
import os
import subprocess

import pytest
import yaml
from typer.testing import CliRunner

from plait.cli.app import app
from tests.docs import tiny_hub

RULES = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory):
    """A config and nothing else, of an architecture that no other test uses, in its own size."""
    import transformers

    path = tmp_path_factory.mktemp("configs") / "seed_oss"
    transformers.SeedOssConfig(architectures=["SeedOssForCausalLM"]).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_hub.smollm2(path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "MODEL"),
        (["x", "--tp", "1"], "--tp"),
        (["x", "--dtype", "int3"], "float64, float32, bfloat16"),
        (["./nowhere"], "there is no './nowhere' here"),
        (["nowhere.json"], "there is no 'nowhere.json' here"),
        (["x", "--tp-plan", "no-such.yaml"], "there is no file 'no-such.yaml'"),
        (["x", "--heads", "0"], "--heads"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_hint(arguments, hint):
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert hint in said(result) and "Traceback" not in result.output


def test_a_plan_file_that_is_no_mapping(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("- colwise")
    result = run("check", "x", "--tp-plan", file)
    assert result.exit_code == 2 and "The plan file rules.yaml." in said(result)


def test_verify_takes_a_prompt_or_a_batch(tmp_path):
    file = tmp_path / "batch.json"
    file.write_text("{}")
    result = run("verify", "x", "--prompt", "y", "--batch", file)
    assert result.exit_code == 2 and "not both" in said(result)


@pytest.mark.ranks(2, 3)
def test_a_right_plan(rank, world_size, config_dir):
    result = run("check", config_dir, "--tp", world_size, "--json")
    assert result.exit_code == 0, result.output
    if rank:
        assert result.stdout == ""
        return
    found = json.loads(result.stdout)
    assert found["ok"] is True and found["first"] is None and found["num_ranks"] == world_size
    assert found["model"].startswith("SeedOssForCausalLM")
    assert found["plan"]["model.layers.*.mlp.down_proj"] == "rowwise"
    assert len(found["held"]) == world_size and max(found["held"]) < 0.6
    kinds = {row["kind"] for row in found["rows"]}
    assert kinds == {"output", "logits", "loss", "weights", "gradient", "drift", "tokens"}


@pytest.mark.ranks(2)
def test_a_table(rank, world_size, config_dir):
    result = run("check", config_dir / "config.json", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    if rank == 0:
        shown = said(result)
        assert "on 2 ranks in float32" in shown and "2 ranks give what one process gives" in shown
        assert "model.layers.*.mlp.down_proj rowwise" in shown
        assert shown.count("self_attn.o_proj") == 2, "once in the plan, once for all layers"


BROKEN = {
    "model.layers.1.mlp.up_proj": "replicate",
    "model.layers.1.mlp.down_proj": "colwise_gather_output",
    "model.layers.1.input_layernorm": "replicated_with_grad_allreduce",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("culprit", BROKEN)
def test_a_broken_plan_exits_with_1_and_names_the_culprit(
    culprit, rank, world_size, config_dir, tmp_path
):
    file = tmp_path / f"rules-{rank}.yaml"
    file.write_text(yaml.safe_dump(RULES | {culprit: BROKEN[culprit]}))
    result = run("check", config_dir, "--tp-plan", file)
    assert result.exit_code == 1, result.output
    if rank == 0:
        assert f"First difference: '{culprit}'" in said(result)
        assert "look here first" in said(result)
        assert f"{culprit} {BROKEN[culprit]}" in said(result), "the plan shows the exception"


@pytest.mark.ranks(2)
def test_a_plan_that_is_refused_exits_with_2(rank, world_size, config_dir, tmp_path):
    file = tmp_path / f"rules-{rank}.json"
    file.write_text(json.dumps({"model.layers.*.mlp.up_projj": "colwise"}))
    result = run("check", config_dir, "--tp-plan", file)
    assert result.exit_code == 2
    assert ("up_projj" in result.stderr) == (rank == 0)


@pytest.mark.ranks(2)
def test_a_directory_without_a_config_exits_with_2(rank, world_size, tmp_path):
    result = run("check", tmp_path)
    assert result.exit_code == 2
    assert ("Reading the config" in result.stderr) == (rank == 0)


@pytest.mark.ranks(3)
def test_own_weights_and_a_batch(rank, world_size, model_dir, tmp_path):
    file = tmp_path / f"batch-{rank}.json"
    file.write_text(json.dumps({"input_ids": [[5, 6, 7, 8]], "labels": [[5, 6, 7, 8]]}))
    for batch in (["--batch", file], ["--prompt", "Three ranks"], []):
        result = run("verify", model_dir, "--tp", 3, "--json", *batch)
        assert result.exit_code == 0, result.output
        if rank == 0:
            found = json.loads(result.stdout)
            assert found["ok"] and found["dtype"] == "float32"
            assert "whole and split in memory" in found["model"]
    file.write_text("[1]")
    assert run("verify", model_dir, "--tp", 3, "--batch", file).exit_code == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="programs start warm on Linux only")
def test_own_ranks(config_dir, tmp_path, warm_commands):
    file = tmp_path / "rules.yaml"
    broken = RULES | {"model.layers.*.mlp.up_proj": "replicate"}
    for rules, code in ((RULES, 0), (broken, 1), ({"nothing": "colwise"}, 2)):
        file.write_text(yaml.safe_dump(rules))
        done = subprocess.run(
            [warm_commands / "plait", "check", config_dir, "--tp-plan", file],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
