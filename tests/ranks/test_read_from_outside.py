"""Modules whose parameters other code reads, without a call of their forward."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import plait
from plait.errors import PlanError
from plait.run import seeds
from plait.styles import containers
from plait.styles.code import mentioned, reads
from plait.testing import add_noise, mutation, parity, tiny

SIZES: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 24,
        "n_heads": 6,
        "n_layers": 1,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 10, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_key_value_heads": 3,
        "kv_channels": 4,
        "intermediate_size": 10,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 12))


class Reads(nn.Module):
    """Takes the weight of one child, and a row of another one, and calls the third."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 10)
        self.down = nn.Linear(10, 12)
        self.kernel = nn.Conv1d(12, 12, 3, padding=1)
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table.weight[: x.shape[1]]
        x = F.conv1d(x.transpose(1, 2), self.kernel.weight, self.kernel.bias, padding=1)
        return self.down(torch.tanh(self.up(x.transpose(1, 2))))


def test_what_the_code_of_a_class_reads() -> None:
    assert reads(Reads) == {"table", "kernel"}
    assert {"weight", "bias", "kernel", "up"} <= mentioned(Reads)
    assert reads(nn.Linear) == frozenset(), "torch's own classes are left out"


@pytest.mark.ranks(2, 3)
def test_a_module_that_reads_its_children() -> None:
    torch.manual_seed(0)
    whole = add_noise(Reads().double())
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def check() -> None:
        split = copy.deepcopy(whole)
        plait.parallelize(split, tp_plan={"up": "colwise", "down": "rowwise"})
        parity.compare(split, whole, {"x": x})

    check()
    with mutation.must_fail(containers, "_read_from_outside", lambda _: [], BaseException):
        check()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_whose_weights_the_module_above_reads(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    config._experts_implementation = "eager"
    with seeds.borrowed(0):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    whole = add_noise(made.eval())
    split = copy.deepcopy(whole)
    plait.parallelize(split, check=False)
    found = parity.compare(split, whole, tiny.batch("llama", size=3))
    assert len(found.grads) > 5
    state = plait.full_state_dict(split)
    assert all(torch.equal(state[name], x) for name, x in whole.state_dict().items())


class WholeTable(nn.Module):
    """Uses the table of its embedding in ways of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embed.weight
        above = (weight > 0).double() - (-weight) / len(weight)
        rows = torch.stack([row * 2 for row in weight])
        data = self.embed.weight.data[3]
        return torch.cat([weight, self.embed(x), above, rows]) + data


class Writes(WholeTable):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.embed
        table.weight.data[0] = 0
        return torch.as_tensor(table(x))


@pytest.mark.ranks(2)
def test_a_table_that_is_used_whole() -> None:
    whole = add_noise(WholeTable().double())
    split = copy.deepcopy(whole)
    plait.parallelize(split, tp_plan={"embed": "embedding_rowwise"}, check=False)
    x = torch.arange(3)
    torch.testing.assert_close(split(x), whole(x))
    split = plait.parallelize(Writes(), tp_plan={"embed": "embedding_rowwise"}, check=False)
    with pytest.raises(PlanError, match="split over the vocabulary"):
        split(x)
