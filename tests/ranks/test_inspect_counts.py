"""What `plait inspect` predicts is what real ranks do: shapes, bytes and every collective."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait.build import inspecting
from plait.comm import count
from plait.hf import skeleton, small
from plait.plan import explain_parts
from plait.styles import linear_forwards
from plait.testing import add_noise, mutation, tiny

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 50}
MOE: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    **SMALL,
    "intermediate_size": 48,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tiny.config("llama"),
    "llama 9/3": lambda: transformers.LlamaConfig(
        **(SMALL | {"hidden_size": 72}),
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: tiny.config("qwen3", num_key_value_heads=4),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_head=6, n_layer=2, vocab_size=97, n_positions=64, bos_token_id=1
    ),
    "olmo2": lambda: tiny.config("olmo2"),
    "olmo2 9/3": lambda: tiny.config(
        "olmo2", hidden_size=72, num_attention_heads=9, num_key_value_heads=3
    ),
    "gemma3": lambda: tiny.config("gemma3_text"),
    "phi3": lambda: tiny.config("phi3"),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **MOE,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_key_value_heads=6,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **MOE, num_hidden_layers=2, num_key_value_heads=3, num_local_experts=4
    ),
    "bert": lambda: transformers.BertConfig(
        **SMALL, num_hidden_layers=2, num_attention_heads=6, is_decoder=True
    ),
    "gpt-neox, parallel blocks": lambda: transformers.GPTNeoXConfig(
        **SMALL, num_hidden_layers=2, num_attention_heads=6
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=97, hidden_size=48, state_size=4, num_hidden_layers=2
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=97,
        d_model=48,
        d_kv=8,
        d_ff=50,
        num_layers=2,
        num_heads=6,
        decoder_start_token_id=0,
    ),
}


def auto_class(name: str) -> Any:
    kind = getattr(CONFIGS[name](), "is_encoder_decoder", False)
    return transformers.AutoModelForSeq2SeqLM if kind else transformers.AutoModelForCausalLM


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return add_noise(auto_class(name).from_config(CONFIGS[name](), dtype=dtype).eval())


def predicted(name: str, batch: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """What is predicted from the model on the meta device."""
    whole = skeleton.empty_model(auto_class(name), CONFIGS[name](), dtype, {})
    return inspecting.explain(whole, None, torch.distributed.get_world_size(), inputs=batch)


def counted(split: Any, batch: dict[str, Any]) -> Any:
    with count() as found:
        split(**batch).loss.backward()
    return found


def tally(phase: Any) -> dict[str, tuple[int, int]]:
    return {kind: (calls, phase.bytes[kind]) for kind, calls in phase.items()}


def problems(expected: Any, split: Any, found: Any) -> list[str]:
    """Where a prediction is not what happened on this rank."""
    assert not expected.not_predicted, expected.not_predicted
    wrong = [
        f"{phase}: predicted {expected.tally(phase)}, counted {tally(getattr(found, phase))}"
        for phase in ("forward", "backward")
        if expected.tally(phase) != tally(getattr(found, phase))
    ]
    rank, params = torch.distributed.get_rank(), dict(split.named_parameters())
    for part in expected.parts:
        for param in part.params:
            name = f"{part.name}.{param.name}" if part.name else param.name
            real = params.pop(name, None)
            if real is None:
                wrong += [] if param.tied else [f"{name}: there is no such parameter"]
                continue
            assert isinstance(real, DTensor)
            shape = tuple(real._local_tensor.shape)
            if (tuple(real.shape), shape) != (param.shape, param.local[rank]):
                wrong.append(f"{name}: predicted {param.local[rank]}, is {shape}")
    return wrong + [f"{name}: not predicted" for name in params]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_bytes_and_collectives(name: str) -> None:
    model = made(name)
    batch = small.example_batch(model, batch=2, length=7)
    expected = predicted(name, batch)
    split = plait.parallelize(model, check=False)
    assert problems(expected, split, counted(split, batch)) == []
    held = sum(p._local_tensor.numel() * p._local_tensor.element_size() for p in split.parameters())
    assert held == expected.local_bytes[torch.distributed.get_rank()]
    assert expected.bytes == sum(p.numel() * p.element_size() for p in split.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["olmo2", "qwen3"])
def test_bytes_in_bfloat16(name: str) -> None:
    model = made(name, torch.bfloat16)
    batch = small.example_batch(model, batch=1, length=5)
    expected = predicted(name, batch, torch.bfloat16)
    split = plait.parallelize(model, check=False)
    assert problems(expected, split, counted(split, batch)) == []


@pytest.mark.ranks(2)
def test_a_reduction_left_out_shows() -> None:
    model = made("llama")
    batch = small.example_batch(model, batch=2, length=7)
    expected = predicted("llama", batch)
    split = plait.parallelize(model, check=False)
    with mutation.must_fail(linear_forwards, "sum_from", lambda x, mesh, fresh=False: x):
        assert problems(expected, split, counted(split, batch)) == []


@pytest.mark.ranks(2)
def test_calls_of_one_layer_times_layers_is_the_whole() -> None:
    model = made("deepseek v3")
    batch = small.example_batch(model, batch=2, length=7)
    expected = predicted("deepseek v3", batch)
    calls = [call for block in expected.blocks for call in block.calls * block.count]
    assert explain_parts.tally(calls) == expected.tally("")


class _Doubled(nn.Module):
    """A layer whose second half is not reached by the loss, and that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)
        self.unused = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x).relu())
        self.unused(x)
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


@pytest.mark.ranks(2, 3)
def test_calls_without_a_backward_and_a_module_called_twice() -> None:
    rules = {"up": "colwise", "down": "rowwise", "unused": "colwise"}
    x = torch.ones(2, 5, 12)
    with torch.device("meta"):
        whole = _Doubled()
    expected = inspecting.explain(whole, rules, torch.distributed.get_world_size(), inputs={"x": x})
    split = plait.parallelize(_Doubled(), tp_plan=rules)
    with count() as found:
        split(x).sum().backward()
    assert problems(expected, split, found) == []
    assert expected.tally("backward") == {"all_reduce": (1, x.numel() * 4)}
