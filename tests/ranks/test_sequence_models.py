"""Sequence parallelism: blocks of many kinds, dropout, FSDP around it, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.comm import count, gather_from
from plait.errors import PlanError
from plait.state import state_of
from plait.testing import add_noise, parity, tiny

FAMILIES = {
    "BertLMHeadModel": "norms behind the residual, rows outside of the attention",
    "BloomForCausalLM": "fused projections by head; regions that take the residual",
    "CohereForCausalLM": "attention and MLP of the same tensor",
    "DeepseekV3ForCausalLM": "low-rank attention, shared experts",
    "FalconForCausalLM": "one key/value head",
    "GPT2LMHeadModel": "weights [in, out], dropouts in the regions",
    "GPTNeoXForCausalLM": "attention and MLP of two norms",
    "Llama4ForCausalLM": "experts that return flattened tokens",
    "MixtralForCausalLM": "experts",
    "OPTForCausalLM": "linear layers in the block itself, flattened tokens",
    "Qwen2MoeForCausalLM": "experts beside a gated one that all tokens take",
    "CTRLLMHeadModel": "hidden states given three times",
    "T5ForConditionalGeneration": "two lists, sublayers, shared position biases",
    "BartForConditionalGeneration": "two lists, biases",
    "Gemma4ForCausalLM": "an argument with a row for every token",
}


def small(name: str, heads: int = 9, kv_heads: int = 3) -> tuple[Any, dict[str, Any]]:
    import transformers

    from plait.hf.small import example_batch, small_config, small_model

    kind = getattr(transformers, name)
    config = small_config(kind.config_class(), heads=heads, kv_heads=kv_heads, intermediate=50)
    model = small_model(kind, config)
    return model, example_batch(model, padding=name != "Gemma4ForCausalLM")


def split_in_sequence(model: Any, **options: Any) -> Any:
    size = torch.distributed.get_world_size() // options.get("dp_shard_size", 1)
    options = {"tp_size": size, "check_plan": False, **options}
    config = plait.DistributedConfig(enable_sequence_parallel=True, **options)
    return plait.parallelize(copy.deepcopy(model), config)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_many_kinds(name: str) -> None:
    whole_model, batch = small(name)
    parity.compare(split_in_sequence(whole_model), whole_model, batch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2"])
def test_fsdp_around_it(name: str) -> None:
    whole_model = add_noise(tiny.model(name))
    split = split_in_sequence(whole_model, dp_shard_size=2)
    parity.compare(split, whole_model, tiny.batch(name, size=2, length=5))


@pytest.mark.ranks(2)
def test_a_list_of_blocks_is_proven_before_it_is_split() -> None:
    whole_model = add_noise(tiny.model("qwen2"))
    split = split_in_sequence(whole_model, check_plan=True)
    parity.compare(split, whole_model, tiny.batch("qwen2"))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_move_the_bytes_of_ordinary_tensor_parallelism(name: str) -> None:
    whole_model, batch = small(name, heads=6, kv_heads=6)
    split = split_in_sequence(whole_model, check_plan=True)
    parity.compare(split, whole_model, batch)
    ids = batch["input_ids"]
    with count() as forward:
        hidden = split.model(ids)[0]
    with count() as backward:
        hidden.square().sum().backward()
    regions = 2 * len(split.model.layers)
    # The sum of the embedding; in the backward small ones, of norms and routing weights.
    assert forward == {"all_gather": regions + 1, "reduce_scatter": regions, "all_reduce": 1}
    assert backward["all_gather"] == regions + 1
    # Low-rank projections are whole on every rank: no sum at the entry of that attention.
    is_low_rank = name.startswith("Deepseek")
    assert backward["reduce_scatter"] == (regions // 2 if is_low_rank else regions)


@pytest.mark.ranks(2)
def test_a_gate_behind_the_experts_is_not_summed_late() -> None:
    whole_model, batch = small("Qwen2MoeForCausalLM")
    split = split_in_sequence(whole_model, check_plan=True)
    parity.compare(split, whole_model, batch)


class Shifting(nn.Module):
    """A block whose own code mixes neighbouring tokens."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.scale = nn.Parameter(torch.ones(12))
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.shift:
            x = x + x.roll(1, dims=-2)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shifting(shift) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _net(shift: bool) -> nn.Module:
    torch.manual_seed(0)
    return add_noise(Net(shift).double())


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (1, 1, 12), (2, 3, 4, 12)])
def test_any_module_and_hidden_states_of_any_number_of_dims(shape: tuple[int, ...]) -> None:
    batch = {"x": torch.randn(shape, dtype=torch.float64, generator=torch.Generator())}
    whole_model = _net(shift=False)
    split = copy.deepcopy(whole_model)
    config = plait.DistributedConfig(
        tp_size=torch.distributed.get_world_size(), enable_sequence_parallel=True
    )
    plait.parallelize(split, config, PLAN, check=batch)
    parity.compare(split, whole_model, batch)


@pytest.mark.ranks(2)
def test_a_block_that_mixes_tokens_is_refused() -> None:
    config = plait.DistributedConfig(tp_size=2, enable_sequence_parallel=True)
    batch = {"x": torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator())}
    model = _net(shift=True)
    with pytest.raises(PlanError, match="Shifting") as refusal:
        plait.parallelize(model, config, PLAN, check=batch)
    assert "enable_sequence_parallel=False" in str(refusal.value)
    with pytest.raises(PlanError, match="check=batch"):
        plait.parallelize(model, config, PLAN)
    with pytest.raises(PlanError, match="no list of blocks"):
        plait.parallelize(tiny.model("mlp"), config, tiny.MLP_PLAN)
    assert not any("_plait_border" in part.__dict__ for part in model.modules())


@pytest.mark.ranks(2)
def test_a_block_that_is_left_out_is_an_error_and_not_a_wrong_result() -> None:
    split = split_in_sequence(add_noise(tiny.model("llama")))
    split.config.num_hidden_layers = 1  # its forward takes that many
    with pytest.raises(PlanError, match="last block"):
        split(**tiny.batch("llama"))


@pytest.mark.ranks(2, 3)
def test_dropout_between_the_regions_differs_by_rank_and_is_repeated_by_a_recomputation() -> None:
    whole_model, batch = small("GPT2LMHeadModel")
    split = split_in_sequence(whole_model).float().train()
    masks: list[torch.Tensor] = []
    for name, part in split.named_modules():
        if isinstance(part, nn.Dropout) and "attn_dropout" not in name:
            part.p = 0.5
            if name.endswith("mlp.dropout"):
                part.register_forward_hook(lambda m, a, out: masks.append((out == 0).float()))
    losses, grads = [], []
    for again in (False, True):
        if again:
            split.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(7)
        split.zero_grad(set_to_none=True)
        loss = split(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append(dict(plait.full_grads(split)))
    assert torch.equal(losses[0], losses[1])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name])
    first = gather_from(masks[0][:, :1].contiguous(), state_of(split).tp_mesh, dim=1)
    dropped = first.float().mean(dim=-1)
    assert dropped.min() > 0.2 and dropped.max() < 0.8
    for one in range(1, first.shape[1]):
        assert not torch.equal(first[:, 0], first[:, one])
