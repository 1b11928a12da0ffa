"""Gradient checkpointing: what is recomputed in the backward is what the forward computed."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.comm import border, count
from plait.testing import add_noise, mutation, parity, tiny
from tests.ranks import dropout_masks
from tests.ranks.dropout_masks import checkpointed

UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 97}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**UNEVEN, "intermediate_size": 50, "tie_word_embeddings": True},
    "qwen2": {"vocab_size": 97},
    "phi3": {"intermediate_size": 50},
    "gemma3_text": {"vocab_size": 98},
    "gpt2": {},
    "t5": {},
    "blocks": {},
}


def pair(name: str) -> tuple[Any, Any]:
    if MODELS[name]:
        whole = add_noise(tiny.model(name, **MODELS[name])).train()
        split = copy.deepcopy(whole)
        plait.parallelize(split)
        return split, whole
    none = {key: 0.0 for key in dropout_masks.SIZES.get(name, {}) if "drop" in key}
    split, whole = dropout_masks.pair(name, **none)
    for model in (split, whole):
        for block in getattr(model, "blocks", ()):
            block.inner, block.dropout = 0.0, nn.Identity()
    return split, whole


def batch(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    if name == "blocks":
        return dropout_masks.batch(name)
    return tiny.batch("llama", size=3, length=5, seed=seed)


def same_everywhere(value: Any) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return all(other == value for other in every)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient(name: str, use_reentrant: bool) -> None:
    split, whole = pair(name)
    checkpointed(split, use_reentrant)
    if name != "blocks":
        for model in (split, whole):  # reentrant checkpoints need an input that requires grad
            model.enable_input_require_grads()
    for seed in range(2):
        with count() as calls:
            parity.compare(split, whole, batch(name, seed))
        assert same_everywhere((dict(calls), dict(calls.bytes))), "ranks recompute differently"


@pytest.mark.ranks(2)
def test_bfloat16() -> None:
    whole = add_noise(tiny.model("llama", dtype=torch.bfloat16)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split)
    split.gradient_checkpointing_enable({"use_reentrant": False})
    parity.compare(split, whole, tiny.batch("llama"))


class Halves(nn.Module):
    """Checkpoints that begin and end inside of a region of split features."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(24, 10), nn.Linear(24, 10)
        self.down = nn.Linear(10, 24)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5  # no leaf: the two layers share a border

        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.up(x) * torch.sigmoid(self.gate(x))

        def outer(y: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(y))

        if self.recompute is None:
            return x + outer(inner(x))
        y = checkpoint(inner, x, use_reentrant=self.recompute)
        return x + checkpoint(outer, y, use_reentrant=self.recompute)


HALVES_PLAN = {"up": "colwise", "gate": "colwise", "down": "rowwise"}


def halves(recompute: bool) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    split = add_noise(Halves(recompute).double())
    whole = copy.deepcopy(split)
    whole.recompute = None
    plait.parallelize(split, tp_plan=HALVES_PLAN)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 24, generator=draw, dtype=torch.float64)
    return split, whole, {"x": x.requires_grad_()}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_that_cut_a_region(use_reentrant: bool) -> None:
    split, whole, arguments = halves(use_reentrant)
    parity.compare(split, whole, arguments)
    with count() as calls:
        split(**arguments).sum().backward()
    # One forward, perhaps again when recomputed; one for the gradient, shared by up and gate, but
    # where a reentrant checkpoint hands its function a leaf.
    assert calls["all_reduce"] in ((4,) if use_reentrant else (2, 3))
    assert same_everywhere(dict(calls))


@pytest.mark.ranks(2)
def test_a_border_from_before_is_noticed() -> None:
    """The border of a recomputed tensor must not be that of the forward's tensor."""
    seen: dict[Any, Any] = {}

    def stale(x: torch.Tensor, group: Any) -> Any:
        return seen.setdefault((x.shape, group), None)

    def keep(x: torch.Tensor, group: Any, made: torch.Tensor) -> None:
        seen[(x.shape, group)] = made

    split, whole = pair("blocks")
    checkpointed(split, False)
    parity.compare(split, whole, batch("blocks"))
    from plait.comm import pairs

    with (
        mutation.must_fail(pairs, "find_border", stale, (AssertionError, RuntimeError)),
        mutation.patched(pairs, "keep_border", keep),
    ):
        parity.compare(split, whole, batch("blocks"))
    assert border.find_border is pairs.find_border
