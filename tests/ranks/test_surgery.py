"""Ordinary changes of a split model: weights, dtypes, copies, compiled forwards."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait.state import LAYOUT, state_of
from plait.surgery import loading
from plait.testing import add_noise, mutation, parity, tiny


def split(name: str = "llama", **overrides: Any) -> Any:
    plan = tiny.MLP_PLAN if name == "mlp" else None
    return plait.parallelize(add_noise(tiny.model(name, **overrides)), tp_plan=plan)


def other(name: str = "llama", **overrides: Any) -> Any:
    """A whole model with other weights than those of `split`."""
    return add_noise(tiny.model(name, seed=5, **overrides), seed=5)


def rank() -> int:
    return torch.distributed.get_rank()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "mlp"])
def test_whole_tensors_are_loaded(name: str, assign: bool) -> None:
    model, whole = split(name), other(name)
    weights = {n: x.clone() for n, x in whole.state_dict().items()}
    ties = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    result = model.load_state_dict(weights, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    same(plait.full_state_dict(model), whole.state_dict())
    assert all(isinstance(p, DTensor) and p.requires_grad for p in model.parameters())
    again = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    groups = [sorted(n for n in t if t[n] == t[k]) for t in (ties, again) for k in sorted(t)]
    assert groups[: len(groups) // 2] == groups[len(groups) // 2 :], "tied stays tied"
    parity.compare(model, whole, tiny.batch(name))


@pytest.mark.ranks(2)
def test_loading_is_what_the_test_says() -> None:
    def turned(x: torch.Tensor, layout: Any, number: int) -> torch.Tensor:
        return real(x, layout, (number + 1) % 2)

    real = loading.local_part
    with mutation.must_fail(loading, "local_part", turned):
        model, whole = split(), other()
        model.load_state_dict(whole.state_dict())
        same(plait.full_state_dict(model), whole.state_dict())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("assign", [False, True])
def test_its_own_state_goes_back(assign: bool) -> None:
    model = split("phi3")
    before = plait.full_state_dict(model)
    own = {n: x.clone() for n, x in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(own, assign=assign)
    same(plait.full_state_dict(model), before)


@pytest.mark.ranks(2)
def test_parts_and_what_does_not_fit() -> None:
    model, whole = split(), other()
    weights = whole.state_dict()
    model.lm_head.load_state_dict(whole.lm_head.state_dict())
    assert torch.equal(plait.full_state_dict(model)["lm_head.weight"], weights["lm_head.weight"])
    model.model.load_state_dict(whole.model.state_dict())
    same(plait.full_state_dict(model), weights)

    wide = dict(weights)
    wide["model.norm.weight"] = torch.ones(7)
    wide["model.layers.0.mlp.up_proj.weight"] = torch.ones(96, 48)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wide)
    assert "size mismatch for model.norm.weight" in str(caught.value)
    assert "size mismatch for model.layers.0.mlp.up_proj.weight" in str(caught.value)

    own = model.state_dict()["lm_head.weight"].to_local()
    with pytest.raises(RuntimeError, match=r"lm_head\.weight: a plain tensor .* one rank's"):
        model.load_state_dict({**weights, "lm_head.weight": own})
    kept = plait.full_state_dict(model)
    same(kept, weights)

    short = {n: x for n, x in weights.items() if n != "lm_head.weight"} | {"extra": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Missing.*lm_head\.weight"):
        model.load_state_dict(short)
    result = model.load_state_dict(short, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and result.unexpected_keys == ["extra"]


@pytest.mark.ranks(2)
def test_a_dtensor_on_another_layout_is_refused() -> None:
    model = split()
    own = model.state_dict()
    weight = own["lm_head.weight"]
    own["lm_head.weight"] = weight.redistribute(placements=[torch.distributed.tensor.Shard(1)])
    with pytest.raises(RuntimeError, match=r"lm_head\.weight: a DTensor placed as .*Shard\(dim=1"):
        model.load_state_dict(own)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3"])
def test_a_copy_is_a_model_of_its_own(name: str) -> None:
    model, batch = split(name), tiny.batch(name)
    whole = add_noise(tiny.model(name))
    copied = copy.deepcopy(model)
    own = {id(p) for p in model.parameters()}
    assert not any(id(p) in own for p in copied.parameters())
    assert len(list(copied.parameters())) == len(list(model.parameters())), "tied stays tied"
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    parity.compare(copied, whole, batch)
    copied.load_state_dict(other(name).state_dict())
    same(plait.full_state_dict(copied), other(name).state_dict())
    assert all(not p.to_local().any() for p in model.parameters())
    ids = batch["input_ids"][:1]
    kept = copied.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(kept, other(name).generate(ids, max_new_tokens=3, do_sample=False))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", ["half", "float", "bfloat16", "to"])
@pytest.mark.parametrize("name", ["gemma3_text", "phi3"])
def test_another_dtype(name: str, change: str) -> None:
    model, whole = split(name), add_noise(tiny.model(name))
    before = {id(p) for p in model.parameters()}
    arguments = (torch.float32,) if change == "to" else ()
    for one in (model, whole):
        getattr(one, change)(*arguments)
    assert {id(p) for p in model.parameters()} == before, "optimizers keep their parameters"
    same(plait.full_state_dict(model), whole.state_dict())
    if change in ("float", "to"):
        parity.compare(model, whole, tiny.batch(name, dtype=torch.float32))


@pytest.mark.ranks(2)
def test_what_is_recorded_on_parameters_outlives_conversions_and_loading() -> None:
    """A parameter whose placement does not say where its pieces belong has a layout of its own."""
    model = split("phi3")
    param = model.model.layers[0].mlp.gate_up_proj.weight
    layout = state_of(model).layouts["model.layers.0.mlp.gate_up_proj.weight"]
    param.__dict__[LAYOUT] = layout
    model.float()
    model.load_state_dict(plait.full_state_dict(model), assign=True)
    model = copy.deepcopy(model)
    param = model.model.layers[0].mlp.gate_up_proj.weight
    assert param.__dict__[LAYOUT] == layout
    from plait.surgery import keeping

    def forgetful() -> None:
        made = split("phi3")
        made.lm_head.weight.__dict__[LAYOUT] = layout
        made.float()
        assert LAYOUT in made.lm_head.weight.__dict__

    forgetful()
    with mutation.must_fail(keeping, "_apply", lambda self, fn, recurse=True: None):
        with mutation.patched(keeping, "keep_records", lambda part: None):
            from plait import surgery

            with mutation.patched(surgery, "keep_records", lambda part: None):
                forgetful()


COMPILED = """
import sys
import torch
import plait
from plait.testing import add_noise, tiny

model = plait.parallelize(add_noise(tiny.model("llama", num_hidden_layers=1)))
whole = add_noise(tiny.model("llama", num_hidden_layers=1))
batch = tiny.batch("llama")
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        found = compiled(**batch).logits
    torch.testing.assert_close(found, whole(**batch).logits, rtol=1e-5, atol=1e-5)
print("compiled")
"""


@pytest.mark.slow
def test_a_compiled_model(tmp_path: Path, warm_commands: Path) -> None:
    # In a program of its own, without the checks of annotations that torch.compile cannot trace.
    (tmp_path / "compiled.py").write_text(COMPILED)
    launcher = [str(warm_commands / "torchrun"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "compiled.py")], capture_output=True, text=True, timeout=110
    )
    assert done.stdout.count("compiled") == 2, done.stderr


class Tree(nn.Module):
    """A module that transformers has never seen, with a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.Mlp()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.sum()


@pytest.mark.ranks(2)
def test_a_module_of_ones_own_inside_another() -> None:
    torch.manual_seed(0)
    tree = Tree().double()
    outer = nn.Sequential(tree, nn.Identity())
    plait.parallelize(tree, tp_plan={"inner.up": "colwise", "inner.down": "rowwise"})
    torch.manual_seed(1)
    new = nn.Sequential(Tree().double(), nn.Identity())
    new[0].scale.fill_(2.0)
    outer.load_state_dict(new.state_dict())
    x = torch.randn(2, 96, dtype=torch.float64)
    torch.testing.assert_close(outer(x), new(x))


UNEVEN = {
    "hidden_size": 40,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "intermediate_size": 34,
    "vocab_size": 97,
    "head_dim": 4,
}
"""Sizes of which no rank holds an equal part: layouts that placements alone do not tell."""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_uneven_parts(name: str) -> None:
    fields = dict(UNEVEN)
    if name == "phi3":
        fields.pop("head_dim")
    model, batch = split(name, **fields), tiny.batch(name)
    for assign in (False, True):
        whole = add_noise(tiny.model(name, seed=7 + assign, **fields), seed=7 + assign)
        model.load_state_dict(whole.state_dict(), assign=assign)
        same(plait.full_state_dict(model), whole.state_dict())
        parity.compare(model, whole, batch)
    copied = copy.deepcopy(model)
    same(plait.full_state_dict(copied), whole.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    parity.compare(copied, whole, batch)
    copied.float(), whole.float()
    same(plait.full_state_dict(copied), whole.state_dict())
    parity.compare(copied, whole, batch)
    copied.double(), whole.double()
    for one in (copied, whole):
        torch.manual_seed(0)
        one.resize_token_embeddings(101, mean_resizing=False)
    same(plait.full_state_dict(copied), whole.state_dict())
    parity.compare(copied, whole, batch)
    with plait.guard(copied, weights_every=1):
        copied(**batch).loss.backward()


@pytest.mark.ranks(2, 3)
def test_a_new_layer_in_an_uneven_place() -> None:
    model, whole = split(**UNEVEN), add_noise(tiny.model("llama", **UNEVEN))
    torch.manual_seed(rank())
    weights = {}
    for path in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"):
        parent, _, name = path.partition(".")
        old = getattr(getattr(model.model.layers[0], parent), name)
        new = nn.Linear(old.in_features, old.out_features, bias=False).double()
        weights[path] = new
        setattr(getattr(model.model.layers[0], parent), name, new)
    plait.adopt(model)
    found = plait.full_state_dict(model)
    for path in weights:
        key = f"model.layers.0.{path}.weight"
        whole.get_parameter(key).data.copy_(found[key])
    parity.compare(model, whole, tiny.batch("llama"))
