"""generate() of models that are really split: caches of local heads, tied and untied heads."""

import copy

import pytest
import torch

from plait import DistributedConfig, parallelize
from tests.ranks.generation_models import prompt


def _whole(world_size: int, tied: bool, **settings):
    """A Llama whose heads divide by `world_size`, with noise in every parameter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = 2 * world_size
    config = LlamaConfig(
        vocab_size=203, hidden_size=8 * heads, intermediate_size=12 * heads, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=world_size, head_dim=8,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied, **settings,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def _split(whole, world_size: int):
    return parallelize(copy.deepcopy(whole), DistributedConfig(tp_size=world_size))


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 7, "temperature": 0.8},
    "beam": {"num_beams": 2},
    "static": {"cache_implementation": "static"},
    "static-chunked": {"cache_implementation": "static", "prefill_chunk_size": 2},
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_one_process_and_caches_hold_local_heads(way, tied, rank, world_size):
    whole = _whole(world_size, tied)
    arguments = {
        **prompt(), "max_new_tokens": 10, "return_dict_in_generate": True, **WAYS[way],
    }  # fmt: skip
    torch.manual_seed(0)
    expected = whole.generate(**arguments)
    torch.manual_seed(rank)
    result = _split(whole, world_size).generate(**arguments)
    assert torch.equal(result.sequences, expected.sequences)
    for layer, whole_layer in zip(
        result.past_key_values.layers, expected.past_key_values.layers, strict=True
    ):
        assert layer.keys.shape[1] == layer.values.shape[1] == 1
        assert whole_layer.keys.shape[1] == world_size


@pytest.mark.ranks(2)
def test_a_cache_is_continued(rank, world_size):
    whole = _whole(world_size, tied=False)
    model = _split(whole, world_size)
    ids = prompt(1)["input_ids"]
    expected = whole.generate(ids, max_new_tokens=12)
    first = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True)
    second = model.generate(
        first.sequences, max_new_tokens=7, past_key_values=first.past_key_values
    )
    assert torch.equal(second, expected)


@pytest.mark.ranks(2)
def test_under_inference_mode(rank, world_size):
    whole = _whole(world_size, tied=True)
    model = _split(whole, world_size)
    with torch.inference_mode():
        tokens = model.generate(**prompt(), max_new_tokens=8)
        expected = whole.generate(**prompt(), max_new_tokens=8)
    assert torch.equal(tokens, expected)
