"""New weights are those of one process, whatever the ranks' seeds, on data ranks too."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import plait
from plait.auto import classes
from plait.testing import mutation, tiny

LAYOUTS = {2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)], 3: [(1, 1, 3)], 4: [(1, 2, 2), (2, 1, 2)]}
UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 97}


def configs() -> list[plait.DistributedConfig]:
    return [
        plait.DistributedConfig(dp_replicate_size=copies, dp_shard_size=shards, tp_size=tp)
        for copies, shards, tp in LAYOUTS[dist.get_world_size()]
    ]


def check(config: plait.DistributedConfig) -> None:
    """A model from a config against one process's, the ranks having other seeds."""
    torch.manual_seed(5 + dist.get_rank())
    split = plait.AutoModelForCausalLM.from_config(
        tiny.config("llama", **UNEVEN), distributed_config=config
    )
    torch.manual_seed(5)
    whole = transformers.AutoModelForCausalLM.from_config(tiny.config("llama", **UNEVEN))
    found, expected = plait.full_state_dict(split), whole.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected), config


@pytest.mark.ranks(2, 3, 4)
def test_a_model_from_a_config() -> None:
    for config in configs():
        check(config)


@pytest.mark.ranks(2, 4)
def test_a_new_head_on_read_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    if dist.get_rank() == 0:
        tiny.model("llama", dtype=torch.float32).save_pretrained(path)
    dist.barrier()
    for config in configs():
        torch.manual_seed(7 + dist.get_rank())
        split = plait.AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=3, distributed_config=config
        )
        torch.manual_seed(7)
        whole = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
        found, expected = plait.full_state_dict(split), whole.state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected), config


@pytest.mark.ranks(2)
def test_the_tests_notice() -> None:
    def own(mesh: object, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with mutation.must_fail(classes, "randomness_of_first", own):
        check(configs()[0])
