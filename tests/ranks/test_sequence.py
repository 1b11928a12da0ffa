"""Sequence parallelism: a split model whose activations are split too is the one-process model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait.comm import count
from plait.errors import PlanError
from plait.styles import sequence_params, sequence_tokens
from plait.testing import add_noise, mutation, parity, tiny
from plait.testing.mutation import patched

MODELS = [name for name in tiny.NAMES if name != "mlp"]


def world() -> int:
    return torch.distributed.get_world_size()


def split_in_sequence(model: Any, mesh: Any = None, **options: Any) -> Any:
    size = mesh["tp"].size() if mesh is not None else world()
    config = plait.DistributedConfig(
        tp_size=size, enable_sequence_parallel=True, **{"check_plan": False, **options}
    )
    return plait.parallelize(copy.deepcopy(model), config, device_mesh=mesh)


def pair(name: str, mesh: Any = None, dtype=torch.float64, **overrides: Any) -> tuple[Any, Any]:  # type: ignore[no-untyped-def]
    whole_model = add_noise(tiny.model(name, dtype=dtype, **overrides))
    return split_in_sequence(whole_model, mesh), whole_model


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient(name: str) -> None:
    split, whole_model = pair(name)
    found = parity.compare(split, whole_model, tiny.batch(name, size=3, length=7, padded=True))
    reached = [name for name, param in whole_model.named_parameters() if param.grad is not None]
    assert set(found.grads) == set(reached) and len(reached) > 3, "a gradient is missing"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_batch_sizes_and_lengths(size: int, length: int) -> None:
    split, whole_model = pair("qwen3")
    batch = tiny.batch("qwen3", size=size, length=length)
    if length == 1:  # its loss has no token; the logits have
        del batch["labels"]
    parity.compare(split, whole_model, batch)
    parity.compare(split, whole_model, batch, grads=False)


@pytest.mark.ranks(2, 3, 4)
def test_heads_that_do_not_divide() -> None:
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    split, whole_model = pair("llama", **sizes, intermediate_size=50, tie_word_embeddings=True)
    parity.compare(split, whole_model, tiny.batch("llama", size=2, length=5))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3"])
def test_bfloat16(name: str) -> None:
    split, whole_model = pair(name, dtype=torch.bfloat16)
    parity.compare(split, whole_model, tiny.batch(name))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_two_groups_and_an_ordinary_model_in_one_process(axis: str) -> None:
    names = ("replica", "tp") if axis == "rows" else ("tp", "replica")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    replica = mesh.get_local_rank("replica")
    first, first_whole = pair("llama", mesh["tp"])
    second_whole = add_noise(tiny.model("qwen2"))
    second = plait.parallelize(copy.deepcopy(second_whole), device_mesh=mesh["tp"])
    for seed in range(2):  # the two groups see different batches
        batch = tiny.batch("llama", size=1 + replica, length=5 + replica, seed=seed + 10 * replica)
        parity.compare(first, first_whole, batch)
        with count() as calls:
            parity.compare(second, second_whole, batch)
        assert "reduce_scatter" not in calls


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    split, whole_model = pair("llama", dtype=torch.float32)
    for model in (split, whole_model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    parity.compare(split, whole_model, tiny.batch("llama"))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["ours", "reentrant", "not reentrant"])
def test_two_forwards_of_two_lengths_before_the_backward(way: str) -> None:
    split, whole_model = pair("llama", dtype=torch.float32)
    for model in (split, whole_model):
        model.train()
        model.enable_input_require_grads()
        if way == "ours":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            for layer in model.model.layers:
                _recompute(layer, way == "reentrant")
        losses = [model(**tiny.batch("llama", length=n)).loss for n in (7, 4)]
        if way == "ours":
            with torch.no_grad():
                model(**tiny.batch("llama", length=5), output_hidden_states=True)
        sum(losses).backward()  # type: ignore[union-attr]
    grads = dict(plait.full_grads(split))
    for name, param in whole_model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_recomputation_that_could_be_either_is_refused() -> None:
    split, _ = pair("llama")
    for layer in split.model.layers:
        _recompute(layer, use_reentrant=True)
    split.enable_input_require_grads()
    batch = tiny.batch("llama")
    split(**batch, output_hidden_states=True).loss.backward()
    with pytest.raises(PlanError, match="both with split tokens and without"):
        split(**batch).loss.backward()


def _recompute(layer: nn.Module, use_reentrant: bool) -> None:
    """Recompute a layer in the backward, not by the layer's own means."""
    from torch.utils.checkpoint import checkpoint

    inner = layer.forward

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return checkpoint(lambda x: inner(x, **kwargs), hidden_states, use_reentrant=use_reentrant)

    layer.forward = forward  # type: ignore[method-assign]


@pytest.mark.ranks(2, 3)
def test_collectives_have_the_bytes_of_ordinary_tensor_parallelism() -> None:
    layers = 3
    split, whole_model = pair("llama", num_hidden_layers=layers)
    ordinary = plait.parallelize(copy.deepcopy(whole_model))
    batch = tiny.batch("llama", length=6)
    hidden = batch["input_ids"].numel() * 96 * 8
    with count() as forward, torch.no_grad():
        split.model(batch["input_ids"])
    # An all-gather and a reduce-scatter for each region; one gather behind the last block.
    assert forward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers, "all_reduce": 1}
    with count() as calls:
        split.model(batch["input_ids"])[0].square().sum().backward()
    with count() as plain:
        ordinary.model(batch["input_ids"])[0].square().sum().backward()
    # Two of each in the forward of a layer and two in its backward, and the ends of the list.
    assert (calls["all_gather"], calls["reduce_scatter"]) == (4 * layers + 2, 4 * layers)
    assert plain == {"all_reduce": 4 * layers + 1}
    assert calls.bytes["reduce_scatter"] == 4 * layers * hidden
    assert calls.bytes["all_gather"] == (4 * layers + 2) * hidden
    assert plain.bytes["all_reduce"] == (4 * layers + 1) * hidden
    norms = 2 * layers * 96 * 8
    assert calls.bytes["all_reduce"] == hidden + norms


@pytest.mark.ranks(2)
def test_between_the_regions_a_rank_holds_its_tokens_only() -> None:
    split, _ = pair("llama", dtype=torch.float32)
    seen: dict[str, set[tuple[int, ...]]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.setdefault(name, set()).update({tuple(args[0].shape), tuple(output.shape)})

        return hook

    for name, module in split.model.layers.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(note(name))
    kept: list[tuple[int, ...]] = []
    batch = tiny.batch("llama", size=3, length=8)
    del batch["labels"]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(tuple(x.shape)) or x, lambda x: x
    ):
        split.model(**batch)
    assert set(seen) == {
        f"{n}.{norm}" for n in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    assert all(shapes == {(3, 4, 96)} for shapes in seen.values())
    # Whole are only what the linear layers of a region take, and the last norm.
    final_norm = kept.count((3, 8, 96))
    assert kept.count((3, 4, 96)) > 2 * final_norm


@pytest.mark.ranks(2)
def test_generate_and_outputs_of_every_block_are_those_of_one_process() -> None:
    split, whole_model = pair("llama")
    batch = {k: v for k, v in tiny.batch("llama").items() if k != "labels"}
    with count() as calls:
        tokens = split.generate(**batch, max_new_tokens=6, do_sample=False)
    assert "reduce_scatter" not in calls
    assert torch.equal(tokens, whole_model.generate(**batch, max_new_tokens=6, do_sample=False))
    with parity.exact():
        got = split(**batch, output_hidden_states=True).hidden_states
        expected = whole_model(**batch, output_hidden_states=True).hidden_states
    assert len(got) == len(expected) == 3
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.ranks(2)
def test_a_deep_copy_is_a_model_of_its_own() -> None:
    split, whole_model = pair("llama")
    copied = copy.deepcopy(split)
    with torch.no_grad():
        for param in split.parameters():
            param.zero_()
    parity.compare(copied, whole_model, tiny.batch("llama"))
    assert any(isinstance(x, sequence_params.WhileSplit) for x in _modes(copied))


def _modes(model: nn.Module) -> list[Any]:
    borders = [m.__dict__.get("_plait_border") for m in model.modules()]
    return [border.grads for border in borders if border is not None]


@pytest.mark.ranks(2)
def test_a_failure_in_a_block_leaves_nothing_behind() -> None:
    split, whole_model = pair("llama")
    layer = split.model.layers[1]
    with patched(layer.mlp, "forward", None), pytest.raises(TypeError):
        split(**tiny.batch("llama"))
    parity.compare(split, whole_model, tiny.batch("llama"))
    x = torch.randn(2, 5, 96, dtype=torch.float64)
    assert layer.input_layernorm(x).shape == x.shape
    assert split.model.layers[0].mlp(x).shape == x.shape  # called by itself: whole, as ever


# --- each of these is noticed -------------------------------------------------------------------


def _check() -> None:
    split, whole_model = pair("llama")
    parity.compare(split, whole_model, tiny.batch("llama", size=2, length=7))


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_summed_is_noticed() -> None:
    with mutation.must_fail(sequence_params.WhileSplit, "_now", lambda self: self.otherwise):
        _check()


@pytest.mark.ranks(2)
def test_a_sum_made_twice_is_noticed() -> None:
    from plait.comm import sum_from

    scatter = sequence_tokens.scatter_sum

    def twice(x: torch.Tensor, mesh: Any, dim: int, sizes: Any = None) -> torch.Tensor:
        return scatter(sum_from(x, mesh), mesh, dim, sizes)

    with mutation.must_fail(sequence_tokens, "scatter_sum", twice):
        _check()


@pytest.mark.ranks(3)
def test_tokens_of_another_rank_are_noticed() -> None:
    split_to = sequence_tokens.split_to

    def rolled(x: torch.Tensor, mesh: Any, dim: int, sizes: Any = None) -> torch.Tensor:
        return split_to(x.roll(1, dim), mesh, dim, sizes)

    with mutation.must_fail(sequence_tokens, "split_to", rolled):
        _check()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_only_cut_is_noticed() -> None:
    from plait.comm import gather_from

    with mutation.must_fail(
        sequence_tokens, "gather_for", lambda *a, **k: gather_from(*a, **k).detach()
    ):
        _check()
