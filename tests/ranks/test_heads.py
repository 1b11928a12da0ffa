"""Heads that do not divide by the ranks: whole heads on every rank, and the one-process model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import plait
from plait.plan.heads import head_map
from plait.state import state_of
from plait.testing import parity
from tests.ranks.head_models import CASES, FUSED, OTHERS, SEPARATE, batch, pair


def world() -> int:
    return torch.distributed.get_world_size()


def world_rank() -> int:
    return torch.distributed.get_rank()


@contextlib.contextmanager
def spied(split: Any, name: str) -> Iterator[list[int]]:
    """Widths of what every attention hands to its output projection, asserted to be the rank's."""
    case, widths = CASES[name], []
    state = state_of(split)
    assert state is not None and state.plan.attention, "no attention is split"
    styles = {entry.name: entry.style for entry in state.plan.entries}
    outputs = [n for n in state.plan.cuts if styles[n] == "rowwise"]
    assert len(outputs) >= len(state.plan.attention)
    hooks = [
        split.get_submodule(n).register_forward_pre_hook(
            lambda _, args: widths.append(args[0].shape[-1])
        )
        for n in outputs
    ]
    try:
        yield widths
    finally:
        for hook in hooks:
            hook.remove()
    heads = head_map(case.num_heads, case.num_kv_heads, world())
    mine = len(heads.places(world_rank())) * case.v_dim
    assert set(widths) == {mine} and len(widths) >= len(outputs)
    assert world() == 1 or mine < case.num_heads * case.v_dim


def check_whole(name: str, **fields: Any) -> None:
    """Outputs, loss, gradients, tokens, state dict, the heads computed and the heads cached."""
    split, whole = pair(name, **fields)
    case = CASES[name]
    with spied(split, name):
        found = parity.compare(split, whole, batch(name))
    reached = [n for n, param in whole.named_parameters() if param.grad is not None]
    assert set(found.grads) == set(reached) and len(reached) > 3
    state, expected = plait.full_state_dict(split), whole.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    prompt = {k: v for k, v in batch(name, size=2).items() if k != "labels"}
    options = {"max_new_tokens": 5, "do_sample": False}
    with parity.exact():
        assert torch.equal(split.generate(**prompt, **options), whole.generate(**prompt, **options))
    if case.cached:
        heads, rank = head_map(case.num_heads, case.num_kv_heads, world()), world_rank()
        expected = {"kv": len(heads.kv[rank]), "query": len(heads.places(rank)), "latent": 1}
        layers = split(**prompt, use_cache=True).past_key_values.layers
        assert layers[0].keys.shape[1] == expected[case.cached]
    plan = state_of(split).plan  # type: ignore[union-attr]
    assert case.style in plan.by_style()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", SEPARATE)
def test_separate_projections(name: str) -> None:
    check_whole(name)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", FUSED)
def test_fused_projections(name: str) -> None:
    check_whole(name)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", OTHERS)
def test_norms_latents_sinks_and_biases_by_head(name: str) -> None:
    check_whole(name)
