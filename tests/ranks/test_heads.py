"""Heads that do not divide by the ranks: whole heads on every rank, and the one-process model."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait import comm
from plait.plan import attention as plan_attention
from plait.plan import cuts
from plait.plan.heads import head_map
from plait.state import state_of
from plait.styles import attention as styles_attention
from plait.styles import head_params, mla, whole_statistics
from plait.styles import heads as styles_heads
from plait.testing import mutation, parity
from tests.ranks.head_models import CASES, FUSED, OTHERS, SEPARATE, batch, model, pair


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


def check_whole(name: str) -> None:
    """Outputs, loss, gradients, tokens, state dict, the heads computed and the heads cached."""
    split, whole = pair(name)
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama 9/3", "phi3", "olmo2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_rank_computes_the_heads_of_its_places(name: str, implementation: str) -> None:
    seen: list[tuple[int, int]] = []
    if name == "gpt_oss" and implementation == "sdpa":
        return  # it has no such attention
    whole = model(name)
    whole.set_attn_implementation(implementation)
    split = copy.deepcopy(whole)
    plait.parallelize(split, check=False)
    heads, rank = head_map(CASES[name].num_heads, CASES[name].num_kv_heads, world()), world_rank()
    if implementation == "eager":
        parity.compare(split, whole, batch(name))
        return
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((query.shape[1], key.shape[1]))
        return plain(query, key, *args, **kwargs)

    with mutation.patched(torch.nn.functional, "scaled_dot_product_attention", spy):
        split(**batch(name))
    places, kv = len(heads.places(rank)), len(heads.kv[rank])
    assert seen and all(q == places and k in (kv, places) for q, k in seen)
    assert places < CASES[name].num_heads


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["qwen2 9/3", "bloom"])
def test_batch_sizes_and_lengths(name: str) -> None:
    split, whole = pair(name)
    for size, length in [(1, 2), (2, 3), (3, 13), (5, 4), (9, 2)]:
        parity.compare(split, whole, batch(name, size=size, length=length))


def _queries_reversed(kind: Any, num_heads: int, size: int) -> Any:
    """Query heads from the other end, key/value heads as they are: others meet."""
    runs = cuts.one_kind(kind, num_heads, size)
    return runs[::-1] if kind == "q" else runs


def _flipped(home: Any, method: str) -> Any:
    """The entries by head in the opposite order."""
    plain = getattr(home, method)

    def flipped(self: Any, *args: Any) -> torch.Tensor:
        x: torch.Tensor = plain(self, *args)
        return x.flip(1 if x.ndim > 2 else -1 if x.ndim == 2 and x.shape[0] > 9 else 0)

    return flipped


MUTATIONS: dict[str, tuple[str, Any, str, Any]] = {
    "query heads meet other key/value heads": (
        "llama 9/3",
        plan_attention,
        "one_kind",
        _queries_reversed,
    ),
    "shared rows lack the gradient of the other ranks": (
        "qwen2 9/3",
        styles_heads,
        "gather_copy",
        comm.gather_from,
    ),
    "a fused weight of sections is read by group": (
        "phi3",
        plan_attention,
        "sections",
        cuts.per_group,
    ),
    "a fused weight of sections is read by head": (
        "gpt2",
        plan_attention,
        "sections",
        cuts.per_group,
    ),
    "a fused weight by group is read as sections": (
        "falcon",
        plan_attention,
        "per_group",
        cuts.sections,
    ),
    "a fused weight by head is read as sections": (
        "bloom",
        plan_attention,
        "per_group",
        cuts.sections,
    ),
    "a norm over all heads sees those of its rank only": (
        "olmo2",
        whole_statistics,
        "sum_from",
        lambda x, mesh: x * mesh.size(),
    ),
    "the gradient of the rotary key is not summed": (
        "deepseek_v2",
        mla,
        "copy_to",
        lambda x, mesh: x,
    ),
    "sinks of other heads": (
        "gpt_oss",
        head_params.PlacedParams,
        "local",
        _flipped(head_params.PlacedParams, "local"),
    ),
    "norms of other heads": (
        "cohere",
        head_params.PlacedParams,
        "local",
        _flipped(head_params.PlacedParams, "local"),
    ),
    "a bias of other heads": (
        "t5",
        head_params.PlacedParams,
        "local",
        _flipped(head_params.PlacedParams, "local"),
    ),
    "slopes of other heads": (
        "falcon rw",
        styles_attention._Rows,
        "_select",
        _flipped(styles_attention._Rows, "_select"),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", MUTATIONS)
def test_these_tests_notice(what: str) -> None:
    name, *change = MUTATIONS[what]
    with mutation.must_fail(*change):
        split, whole = pair(name)
        parity.compare(split, whole, batch(name))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_two_separate_groups_and_two_models_in_one_process(axis: str) -> None:
    names = ("replica", "tp") if axis == "rows" else ("tp", "replica")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    replica = mesh.get_local_rank("replica")
    pairs = []
    for name in ("qwen2 9/3", "olmo2"):
        whole = model(name)
        split = copy.deepcopy(whole)
        pairs.append((name, plait.parallelize(split, device_mesh=mesh, check=False), whole))
    for step in range(2):  # the two groups see different batches
        for name, split, whole in pairs:
            given = batch(name, size=1 + replica, length=5 + replica + step)
            parity.compare(split, whole, given)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama 9/3", "phi3", "olmo2"])
def test_bfloat16(name: str) -> None:
    split, whole = pair(name, torch.bfloat16)
    parity.compare(split, whole, batch(name))
    assert all(param.dtype == torch.bfloat16 for param in split.parameters())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen2 9/3", "phi3", "olmo2"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    # Float32: the float64 mode of the comparison is not active where a block is recomputed.
    split, whole = pair(name, torch.float32)
    for one in (split, whole):
        one.train()
        one.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        one.enable_input_require_grads()
    parity.compare(split, whole, batch(name))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["qwen2 9/3", "falcon", "bloom", "gpt_oss"])
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    split, whole = pair(name)
    copied = copy.deepcopy(split)
    with torch.no_grad():
        for param in split.parameters():
            param.zero_()
    parity.compare(copied, whole, batch(name))
    parity.compare(copied, whole, batch(name, length=4))


@pytest.mark.ranks(2)
def test_the_improved_plan_is_proven_on_a_small_copy() -> None:
    split, whole = pair("phi3", check=True)
    parity.compare(split, whole, batch("phi3"))
    assert "colwise_qkv" in state_of(split).plan.by_style()  # type: ignore[union-attr]
