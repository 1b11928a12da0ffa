"""Key/value heads that several ranks share: stored once, gathered when used, trained as one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.comm import count
from plait.testing import add_noise, mutation, parity, tiny

SIZES: dict[str, Any] = {
    "hidden_size": 18,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 96,
    "num_hidden_layers": 2,
}


def pair(name: str = "qwen2", dtype: torch.dtype = torch.float64, **sizes: Any) -> tuple[Any, Any]:
    """A model whose key/value heads are shared at 2 and 4 ranks, split and whole."""
    whole = add_noise(tiny.model(name, dtype=dtype, **{**SIZES, **sizes}))
    split = plait.parallelize(copy.deepcopy(whole), check=False)
    return split, whole


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(0.5),
    "copy_": lambda x: x.copy_(x + 0.5),
    "data": lambda x: x.data.add_(0.5),
    "foreach": lambda x: torch._foreach_add_([x], 0.5),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_of_the_weight_is_seen_by_the_next_call(how: str, frozen: bool) -> None:
    split, whole = pair()
    batch = tiny.batch("llama")
    for model in (split, whole):
        model.requires_grad_(not frozen)
    with torch.no_grad():
        parity.compare(split, whole, batch, grads=False)
        for model in (split, whole):
            for name, param in model.named_parameters():
                if "k_proj" in name or "v_proj" in name:
                    CHANGES[how](param)
        parity.compare(split, whole, batch, grads=False)


@pytest.mark.ranks(2)
def test_generate_gathers_shared_heads_once_a_call() -> None:
    split, whole = pair()
    ids = tiny.batch("llama", size=1)["input_ids"]
    found = []
    for num_tokens in (2, 8):
        with count() as calls:
            tokens = split.generate(ids, max_new_tokens=num_tokens, do_sample=False)
        found.append(calls.get("all_gather", 0))
        assert torch.equal(tokens, whole.generate(ids, max_new_tokens=num_tokens, do_sample=False))
    # Weight and bias of k and of v in both layers, and for each token the head's logits.
    assert found == [2 * 2 * 2 + 2, 2 * 2 * 2 + 8], found
    with torch.no_grad():
        for model in (split, whole):
            torch._foreach_mul_(list(model.parameters()), 1.5)
    assert torch.equal(
        split.generate(ids, max_new_tokens=8, do_sample=False),
        whole.generate(ids, max_new_tokens=8, do_sample=False),
    )
