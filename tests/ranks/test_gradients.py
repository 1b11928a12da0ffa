"""Gradients of parameters that every rank holds whole: each term once, in any kind of loop."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait.comm import count
from plait.styles import whole as whole_styles
from plait.testing import add_noise, mutation, parity, tiny

UNEVEN = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 97,
}


def pair(name: str, **sizes: Any) -> tuple[Any, Any]:
    whole = add_noise(tiny.model(name, **sizes)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split, tp_plan=tiny.MLP_PLAN if name == "mlp" else None)
    return split, whole


def step(models: Any, name: str, seed: int = 0, **arguments: Any) -> None:
    for model in models:
        with parity.exact():
            model(**tiny.batch(name, seed=seed), **arguments).loss.backward()


def assert_equal_gradients(split: nn.Module, whole: nn.Module) -> None:
    full = plait.full_grads(split)
    for name, param in whole.named_parameters():
        if param.grad is None:
            assert name not in full or not full[name].any(), name
        else:
            torch.testing.assert_close(full[name], param.grad, rtol=1e-9, atol=1e-12, msg=name)


def assert_ranks_agree(split: nn.Module) -> None:
    grads = [
        p.grad.to_local()
        for p in split.parameters()
        if p.grad is not None and p.placements[0].is_replicate()
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, grads)
    for other in every:
        assert all(map(torch.equal, grads, other)), "ranks have other gradients of one parameter"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads": ("qwen3", {}),
    "biases after the sum": ("starcoder2", {}),
    "shared key/value heads with biases": (
        "qwen2",
        {"num_attention_heads": 12, "num_key_value_heads": 1},
    ),
    "uneven heads": ("llama", UNEVEN),
    "norms over the whole width": ("olmo2", {"num_attention_heads": 12, "num_key_value_heads": 4}),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
def test_whole_parameters_get_every_term_once(case: str) -> None:
    name, sizes = CASES[case]
    models = pair(name, **sizes)
    step(models, name)
    assert_equal_gradients(*models)
    assert_ranks_agree(models[0])


@pytest.mark.ranks(2, 3)
def test_learned_scalars_between_split_layers() -> None:
    """Apertus has two numbers in its activation, which sees a slice of the MLP's width."""
    from transformers import ApertusConfig, ApertusForCausalLM

    from plait.hf.small import example_batch, small_config, small_model

    config = small_config(ApertusConfig(), heads=6, kv_heads=3, intermediate=50)
    whole = small_model(ApertusForCausalLM, config).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split)
    batch = example_batch(whole)
    found = parity.compare(split, whole, batch)
    scalars = [n for n in found.grads if "alpha" in n]
    assert len(scalars) >= 4
    params = dict(split.named_parameters())
    placed = params[next(n for n in params if "mlp.down_proj" in n)].placements[0]
    assert not placed.is_replicate(), "the MLP was left whole"
    assert_ranks_agree(split)


@pytest.mark.ranks(2, 3)
def test_accumulation_zeroing_and_gradients_taken_away() -> None:
    models = pair("qwen3")
    for seed in range(2):
        step(models, "qwen3", seed)
    assert_equal_gradients(*models)
    for model in models:
        model.zero_grad(set_to_none=False)
    assert all(not g.any() for g in plait.full_grads(models[0]).values())
    step(models, "qwen3", 2)
    assert_equal_gradients(*models)
    for model in models:
        for name, param in model.named_parameters():
            if "norm" in name or "o_proj" in name:
                param.grad = None
    step(models, "qwen3", 3)
    assert_equal_gradients(*models)
    assert_ranks_agree(models[0])


@pytest.mark.ranks(2)
def test_frozen_parameters_and_parameters_that_a_step_does_not_use() -> None:
    models = pair("qwen3")
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_("k_norm" in name or "v_proj" in name or "embed" in name)
    step(models, "qwen3")
    assert_equal_gradients(*models)
    assert sum(p.grad is not None for p in models[0].parameters()) == 5
    for model in models:
        model.zero_grad()
        with parity.exact():  # the first layer only: nothing behind it gets a gradient
            hidden = model(**tiny.batch("qwen3"), output_hidden_states=True).hidden_states[1]
            hidden.pow(2).sum().backward()
    assert_equal_gradients(*models)
    assert models[1].model.layers[1].self_attn.k_norm.weight.grad is None
    assert models[1].model.layers[0].self_attn.k_norm.weight.grad is not None


@pytest.mark.ranks(2, 3)
def test_gradients_asked_for_by_name() -> None:
    models = pair("qwen3")
    found = []
    for model in models:
        wanted = {
            name: param
            for name, param in model.named_parameters()
            if "q_norm" in name or "down_proj" in name or "embed" in name
        }
        with parity.exact():
            loss = model(**tiny.batch("qwen3")).loss
            grads = torch.autograd.grad(loss, list(wanted.values()))
        found.append(dict(zip(wanted, grads, strict=True)))
    layouts = plait.state.state_of(models[0]).layouts  # type: ignore[union-attr]
    for name, grad in found[0].items():
        assert isinstance(grad, DTensor) and grad.placements == layouts_of(models[0], name)
        whole = plait.state.gather_whole(grad.to_local(), layouts[name], grad.device_mesh)
        torch.testing.assert_close(whole, found[1][name], rtol=1e-9, atol=1e-12)
    assert all(param.grad is None for param in models[0].parameters())


def layouts_of(model: nn.Module, name: str) -> Any:
    return model.get_parameter(name).placements


@pytest.mark.ranks(2)
def test_hooks_on_parameters_and_a_step_inside_the_backward() -> None:
    models = pair("qwen3")
    calls: list[str] = []
    for model in models:
        for name, param in model.named_parameters():
            if "q_norm" in name:
                param.register_hook(lambda grad: grad * 2)

            def update(p: Any, name: str = name) -> None:
                calls.append(name)
                assert type(p.grad) is type(p.data)
                with torch.no_grad():
                    p.add_(p.grad, alpha=-0.1)
                p.grad = None

            param.register_post_accumulate_grad_hook(update)
    for seed in range(2):
        step(models, "qwen3", seed)
    names = dict(models[1].named_parameters())
    assert sorted(calls) == sorted(4 * list(names))
    full = plait.full_state_dict(models[0])
    for name, param in names.items():
        torch.testing.assert_close(full[name], param.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2, 3)
def test_collectives_of_a_training_step_are_the_fewest() -> None:
    split, _ = pair("llama", num_hidden_layers=3)
    batch = tiny.batch("llama")
    with count() as calls:
        hidden = split.model(input_ids=batch["input_ids"]).last_hidden_state
        hidden.pow(2).mean().backward()
    # Two and two a layer, and the look-up in the embedding.
    assert calls == {"all_reduce": 4 * 3 + 1}
    assert calls.bytes["all_reduce"] == (4 * 3 + 1) * hidden.numel() * hidden.element_size()


MUTATIONS = {
    "norms keep their rank's term": (
        whole_styles.ReplicatedWithGradAllReduce,
        "param_grads",
        lambda self, module: {},
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_tests_notice(what: str) -> None:
    models = pair("qwen3")
    with mutation.must_fail(*MUTATIONS[what]):
        step(models, "qwen3")
        assert_equal_gradients(*models)
