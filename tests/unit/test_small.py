"""Small copies keep the structure: the class, the kinds of layers, the ratios of heads."""

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from plait.hf.small import example_batch, small_config, small_model


def config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


@pytest.mark.parametrize(
    ("query", "kv", "small_query", "small_kv"),
    [(32, 32, 4, 4), (32, 8, 8, 2), (28, 4, 14, 2), (32, 1, 4, 1), (8, 1, 4, 1)],
)
def test_the_kind_of_attention_stays(query: int, kv: int, small_query: int, small_kv: int) -> None:
    original = config("qwen2", num_attention_heads=query, num_key_value_heads=kv)
    small = small_config(original)
    assert type(small) is type(original) and original.num_attention_heads == query
    assert (small.num_attention_heads, small.num_key_value_heads) == (small_query, small_kv)


@pytest.mark.parametrize(("heads", "kv"), [(4, 1), (9, 3), (6, 6)])
def test_heads_that_are_asked_for(heads: int, kv: int) -> None:
    small = small_config(config("gemma3"), heads=heads, kv_heads=kv)
    text, vision = small.text_config, small.vision_config
    assert (text.num_attention_heads, text.num_key_value_heads) == (heads, kv)
    assert vision.num_attention_heads == heads and vision.hidden_size % heads == 0


def test_every_kind_of_layer_is_there() -> None:
    small = small_config(config("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 2
    mixed = small_config(config("deepseek_v3"))
    assert mixed.first_k_dense_replace == 1 < mixed.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "deepseek_v3", "mamba", "t5"])
def test_a_small_model_runs_and_is_the_same_every_time(name: str) -> None:
    auto = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    family: Any = getattr(transformers, auto)
    first, second = (small_model(family, small_config(config(name))) for _ in range(2))
    for (key, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float64, key
        assert a.std() > 0 or a.numel() == 1, f"{key} is constant"
    batch = example_batch(first, padding=True)
    out = first(**batch)
    out.loss.backward()
    assert torch.isfinite(out.loss) and out.logits.shape[-1] == 131
    assert sum(p.numel() for p in first.parameters()) < 2_000_000
