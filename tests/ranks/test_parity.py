"""A split model is the one-process model: outputs, loss, every gradient, greedy tokens."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait.comm import count
from plait.styles import embedding, linear_forwards, whole
from plait.testing import add_noise, mutation, parity, tiny

LANGUAGE_MODELS = [name for name in tiny.NAMES if name != "mlp"]


def pair(name: str, mesh: Any = None, dtype=torch.float64, **overrides: Any) -> tuple[Any, Any]:  # type: ignore[no-untyped-def]
    """A tiny model with noise on every parameter, and the same model split."""
    whole_model = add_noise(tiny.model(name, dtype=dtype, **overrides))
    split = copy.deepcopy(whole_model)
    plan = tiny.MLP_PLAN if name == "mlp" else None
    plait.parallelize(split, tp_plan=plan, device_mesh=mesh)
    return split, whole_model


def world() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_logits_loss_and_every_gradient(name: str) -> None:
    split, whole_model = pair(name)
    found = parity.compare(split, whole_model, tiny.batch(name, size=3, length=7, padded=True))
    reached = [name for name, param in whole_model.named_parameters() if param.grad is not None]
    assert set(found.grads) == set(reached) and len(reached) > 3, "a gradient is missing"
    fraction = plait.held_fraction(split)
    assert 1 / world() <= fraction < 1 / world() + 0.1, fraction
    state, expected = plait.full_state_dict(split), whole_model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_greedy_tokens(name: str) -> None:
    split, whole_model = pair(name)
    torch.manual_seed(torch.distributed.get_rank())
    batch = {k: v for k, v in tiny.batch(name).items() if k != "labels"}
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(split.generate(**batch, **options), whole_model.generate(**batch, **options))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_batch_sizes_and_lengths(size: int, length: int) -> None:
    split, whole_model = pair("qwen3")
    parity.compare(split, whole_model, tiny.batch("qwen3", size=size, length=length + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3"])
def test_bfloat16(name: str) -> None:
    split, whole_model = pair(name, dtype=torch.bfloat16)
    parity.compare(split, whole_model, tiny.batch(name))
    assert all(p.dtype == torch.bfloat16 for p in split.parameters())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_two_separate_groups_and_two_models_in_one_process(axis: str) -> None:
    names = ("replica", "tp") if axis == "rows" else ("tp", "replica")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    replica = mesh.get_local_rank("replica")
    first, first_whole = pair("llama", mesh)
    second, second_whole = pair("qwen2", mesh)
    for seed in range(2):  # the two groups see different batches
        batch = tiny.batch("llama", size=1 + replica, length=5 + replica, seed=seed + 10 * replica)
        parity.compare(first, first_whole, batch)
        parity.compare(second, second_whole, batch)


@pytest.mark.ranks(2)
def test_grouped_key_value_heads() -> None:
    split, whole_model = pair("llama", num_key_value_heads=2)
    parity.compare(split, whole_model, tiny.batch("llama"))
    caches = split(**tiny.batch("llama")).past_key_values
    assert caches.layers[0].keys.shape[1] == 1, "the cache holds local heads only"


@pytest.mark.ranks(2, 3)
def test_vocabulary_and_mlp_widths_that_do_not_divide() -> None:
    split, whole_model = pair("llama", vocab_size=97, intermediate_size=49)
    parity.compare(split, whole_model, tiny.batch("llama"))
    tied, tied_whole = pair("gemma3_text", vocab_size=101)
    parity.compare(tied, tied_whole, tiny.batch("gemma3_text"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.ranks(2, 3)
def test_collectives_of_a_llama_layer() -> None:
    split, _ = pair("llama", num_hidden_layers=3)
    batch = tiny.batch("llama")
    ids = batch["input_ids"]
    with torch.no_grad(), count() as forward:
        split(ids)
    # Two per layer and one for the embedding; the head gathers its logits.
    assert forward == {"all_reduce": 2 * 3 + 1, "all_gather": 1}
    with count() as both:
        split(**batch).loss.backward()
    # Backward: q, k and v share one, gate and up share one, the head has one. The logits stay
    # split: the loss takes two small ones.
    assert both == {"all_reduce": 2 * 3 + 1 + 2 + 2 * 3 + 1}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    # Float32: the float64 mode of the comparison is not active where a block is recomputed.
    split, whole_model = pair("llama", dtype=torch.float32)
    for model in (split, whole_model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    parity.compare(split, whole_model, tiny.batch("llama"))


@pytest.mark.ranks(2)
def test_a_deep_copy_is_a_model_of_its_own() -> None:
    split, whole_model = pair("llama")
    copied = copy.deepcopy(split)
    with torch.no_grad():
        for param in split.parameters():
            param.zero_()
    parity.compare(copied, whole_model, tiny.batch("llama"))
    parity.compare(copied, whole_model, tiny.batch("llama", length=4))


@pytest.mark.ranks(2)
def test_frozen_and_partly_frozen_models() -> None:
    split, whole_model = pair("llama")
    for model in (split, whole_model):
        for name, param in model.named_parameters():
            param.requires_grad_("o_proj" in name or "norm" in name)
    found = parity.compare(split, whole_model, tiny.batch("llama"))
    assert 0 < len(found.grads) < len(list(whole_model.parameters()))


@pytest.mark.ranks(2, 3)
def test_accumulated_gradients() -> None:
    split, whole_model = pair("qwen2")
    for seed in range(3):
        for model in (split, whole_model):
            with parity.exact():
                model(**tiny.batch("qwen2", seed=seed)).loss.backward()
    grads = plait.full_grads(split)
    for name, param in whole_model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12)


class Rest(nn.Module):
    """Modules that no rule names and whose forward reads parameters in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.mlp = tiny.Mlp(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.attention(x, x, x)[0]
        x = self.encoder(self.recurrent(x)[0])
        return self.mlp(self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_no_rule_names(training: bool) -> None:
    torch.manual_seed(0)
    whole_model = add_noise(Rest().double().train(training))
    split = copy.deepcopy(whole_model)
    plait.parallelize(split, tp_plan={"mlp.up": "colwise", "mlp.down": "rowwise"})
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parity.compare(split, whole_model, {"x": x})
    with torch.no_grad():
        parity.compare(split, whole_model, {"x": x}, grads=False)
    torch.optim.AdamW(split.parameters(), foreach=True).step()


@pytest.mark.ranks(2, 3)
def test_an_empty_plan_splits_nothing() -> None:
    split, whole_model = pair("llama")
    split = copy.deepcopy(whole_model)
    plait.parallelize(split, tp_plan={})
    with count() as calls:
        parity.compare(split, whole_model, tiny.batch("llama"))
    assert calls == {} and plait.held_fraction(split) == 1.0


MUTATIONS = {
    "the sum after a rowwise layer is dropped": (
        linear_forwards,
        "sum_from",
        lambda x, mesh, **_: x,
    ),
    "the sum of input gradients is dropped": (linear_forwards, "copy_to", lambda x, mesh: x),
    "look-ups of the embedding are not summed": (embedding, "sum_from", lambda x, mesh: x),
    "a rowwise layer sums twice": (
        linear_forwards,
        "sum_from",
        lambda x, mesh, **_: plait.comm.sum_from(x, mesh) * 2,  # type: ignore[attr-defined]
    ),
    "norms between split layers keep their own gradient": (
        whole.ReplicatedWithGradAllReduce,
        "param_grads",
        lambda self, module: {},
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_parity_test_notices(what: str) -> None:
    split, whole_model = pair("qwen3")
    parity.compare(split, whole_model, tiny.batch("qwen3"))
    with mutation.must_fail(*MUTATIONS[what]):
        parity.compare(split, whole_model, tiny.batch("qwen3"))


@pytest.mark.ranks(2)
def test_the_parity_test_notices_a_bias_that_is_added_on_every_rank() -> None:
    split, whole_model = pair("mlp")
    parity.compare(split, whole_model, tiny.batch("mlp"))

    def biased(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        mesh = linear_forwards.border_of(module).mesh
        parts = linear_forwards.local(weight), linear_forwards.local(bias)
        return linear_forwards.sum_from(nn.functional.linear(x, *parts), mesh)

    with mutation.must_fail(split.down, "forward", biased.__get__(split.down)):
        parity.compare(split, whole_model, tiny.batch("mlp"))
