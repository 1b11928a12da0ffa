"""Whole against split: right plans pass, and of a broken one the culprit is named."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import PlaitError
from plait.proof import Report, prove
from plait.run import seeds
from plait.styles import embedding, linear_forwards
from plait.testing import add_noise, mutation, tiny


def mesh() -> Any:
    return plait.build.mesh_for(plait.DistributedConfig(tp_size=torch.distributed.get_world_size()))


def proved(
    name: str, plan: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> Report:
    plan = tiny.MLP_PLAN if name == "mlp" and plan is None else plan
    overrides = options.pop("overrides", {})
    return prove(
        lambda: add_noise(tiny.model(name, dtype=dtype, **overrides)),
        functools.partial(plait.parallelize, tp_plan=plan, device_mesh=mesh()),
        tiny.batch(name),
        mesh=mesh(),
        **options,
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "phi3", "llava", "mlp"])
def test_a_right_plan_passes(name: str) -> None:
    report = proved(name)
    assert report.ok and report.first is None, str(report)
    kinds = {row.kind for row in report.rows if row.ok}
    assert kinds >= {"output", "logits", "weights", "gradient", "drift"}
    assert ("tokens" in kinds) == (name != "mlp") == ("loss" in kinds)
    assert all(row.ok is not None for row in report.rows), "something was not compared"
    assert name == "phi3" or any(row.note == "slice" for row in report.rows)
    assert report.largest("logits", "gradient") < 1e-11


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    report = proved("llama", dtype=dtype)
    assert report.ok and report.dtype in str(dtype), str(report)


LAYER = "model.layers.1."
ATTENTION, MLP = f"{LAYER}self_attn", f"{LAYER}mlp"
BROKEN = {
    # name: (rules that replace shipped ones (None drops one), the culprit)
    "a rowwise layer as colwise_gather_output": (
        {f"{ATTENTION}.o_proj": "colwise_gather_output"},
        f"{ATTENTION}.o_proj",
    ),
    "a rule dropped: down": ({f"{MLP}.down_proj": None}, f"{MLP}.down_proj"),
    "a rule dropped: up": ({f"{MLP}.up_proj": None}, f"{MLP}.up_proj"),
    "an output is gathered that should stay split": (
        {f"{MLP}.gate_proj": "colwise_gather_output"},
        f"{MLP}.gate_proj",
    ),
    "an output stays split that should be gathered": ({"lm_head": "colwise"}, "lm_head"),
    "the gradient of a norm on local heads is not summed": (
        {f"{ATTENTION}.q_norm": "replicate"},
        f"{ATTENTION}.q_norm",
    ),
    "the gradient of a norm on everything is summed": (
        {f"{LAYER}input_layernorm": "replicated_with_grad_allreduce"},
        f"{LAYER}input_layernorm",
    ),
    "a sum too many": (
        {f"{LAYER}post_attention_layernorm": "all_reduce"},
        f"{LAYER}post_attention_layernorm",
    ),
}


def broken_plan(name: str, changes: dict[str, str | None]) -> dict[str, str]:
    rules = dict(tiny.model(name)._tp_plan)  # type: ignore[attr-defined]
    for pattern, style in changes.items():
        rules[pattern] = "replicate" if style is None else style
    return rules


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_plan_names_the_culprit(what: str) -> None:
    changes, culprit = BROKEN[what]
    report = proved("qwen3", broken_plan("qwen3", changes))
    assert not report.ok
    assert report.first == culprit, str(report)
    assert report.why and repr(culprit) in str(report)


class Mixer(nn.Module):
    """Attention under names that no plan knows, with a norm before it and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.LayerNorm(24)
        self.alpha, self.beta, self.gamma = (nn.Linear(24, 24) for _ in range(3))
        self.delta = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.pre(x)
        heads = [
            layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.alpha, self.beta, self.gamma)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return x + self.delta(mixed.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(48, 24)
        self.mixers = nn.ModuleList(Mixer() for _ in range(3))
        self.last = nn.Linear(24, 48)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return {"logits": self.last(x)}


STACK = {
    "first": "embedding_rowwise",
    **{f"mixers.*.{name}": "colwise" for name in ("alpha", "beta", "gamma")},
    "mixers.*.delta": "rowwise",
    "last": "colwise_gather_output",
}
BROKEN_STACK = {
    "one of three is whole": ({"beta": "replicate"}, "beta"),
    "the first of three is whole": ({"alpha": "replicate"}, "alpha"),
    "one of three gathers": ({"gamma": "colwise_gather_output"}, "gamma"),
    "one of three is rowwise": ({"beta": "rowwise"}, "beta"),
    "one of three splits its input": ({"alpha": "rowwise_split_input"}, "alpha"),
    "one alone is split": (
        {"alpha": "replicate", "beta": "replicate", "delta": "replicate"},
        "gamma",
    ),
    "rowwise alone": (
        {"alpha": "replicate", "beta": "replicate", "gamma": "replicate"},
        "delta",
    ),
    "the last is whole": ({"delta": "replicate"}, "delta"),
    "the last gathers": ({"delta": "colwise_gather_output"}, "delta"),
    "the last stays split": ({"delta": "colwise"}, "delta"),
    "the norm's gradient is summed": ({"pre": "replicated_with_grad_allreduce"}, "pre"),
    "the norm's output is summed": ({"pre": "all_reduce"}, "pre"),
}


def stack(plan: dict[str, str]) -> Report:
    def make() -> nn.Module:
        with seeds.borrowed(0):
            return add_noise(Stack().double())

    ids = torch.arange(14).reshape(2, 7) * 3
    split = functools.partial(plait.parallelize, tp_plan=plan, device_mesh=mesh())
    return prove(make, split, {"ids": ids}, mesh=mesh())


@pytest.mark.ranks(2, 3)
def test_an_own_architecture() -> None:
    report = stack(STACK)
    assert report.ok and report.first is None, str(report)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", BROKEN_STACK)
def test_a_broken_plan_of_an_own_architecture(what: str) -> None:
    changes, culprit = BROKEN_STACK[what]
    rules = STACK | {f"mixers.1.{name}": style for name, style in changes.items()}
    report = stack(rules)
    assert not report.ok and report.first == f"mixers.1.{culprit}", str(report)


@pytest.mark.ranks(2, 3)
def test_the_axis_works_after_a_failure() -> None:
    failed = stack(STACK | {"mixers.1.delta": "replicate"})
    assert [row.kind for row in failed.wrong] == ["error"]
    assert stack(STACK).ok


@pytest.mark.ranks(2)
def test_drift_is_a_kind_of_its_own() -> None:
    report = proved("qwen3", broken_plan("qwen3", {f"{ATTENTION}.q_norm": "replicate"}))
    wrong = {(row.kind, row.name) for row in report.wrong}
    assert wrong == {(kind, f"{ATTENTION}.q_norm.weight") for kind in ("gradient", "drift")}


MUTATIONS = {
    "a sum is dropped": (
        (linear_forwards, "sum_from", lambda x, mesh, **_: x),
        "model.layers.0.self_attn.o_proj",
        "term",
    ),
    "look-ups are not summed": (
        (embedding, "sum_from", lambda x, mesh: x),
        "model.embed_tokens",
        "",
    ),
    "a sum is taken twice": (
        (linear_forwards, "sum_from", lambda x, mesh, **_: plait.comm.sum_from(x, mesh) * 2),
        "model.layers.0.self_attn.o_proj",
        "",
    ),
    "input gradients are not summed": (
        (linear_forwards, "copy_to", lambda x, mesh: x),
        "lm_head",
        "gradient of its input",
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_broken_style_names_the_first_module_that_uses_it(what: str) -> None:
    patch, culprit, why = MUTATIONS[what]
    with mutation.patched(*patch):
        report = proved("qwen3")
    assert report.first == culprit and why in report.why, str(report)


@pytest.mark.ranks(2, 3)
def test_a_fused_layer_cut_as_if_it_were_not() -> None:
    report = proved("phi3", broken_plan("phi3", {f"{MLP}.gate_up_proj": "colwise"}))
    assert report.first == f"{MLP}.gate_up_proj", str(report)
    assert repr(MLP) in report.why


@pytest.mark.ranks(2)
def test_only_one_rank_fails() -> None:
    def split(model: nn.Module) -> nn.Module:
        plait.parallelize(model, device_mesh=mesh())
        if torch.distributed.get_rank() == 1:
            part = model.get_submodule(f"{MLP}.act_fn")

            def fails(x: torch.Tensor) -> torch.Tensor:
                raise ZeroDivisionError("only here")

            part.__dict__["forward"] = fails
        return model

    report = prove(lambda: tiny.model("llama"), split, tiny.batch("llama"), mesh=mesh())
    assert report.first == f"{MLP}.act_fn", str(report)
    assert "only here" in str(report)


class Biased(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ZeroDivisionError("backwards")


@pytest.mark.ranks(2)
def test_a_backward_that_fails() -> None:
    def split(model: nn.Module) -> nn.Module:
        plait.parallelize(model, device_mesh=mesh())
        part = model.get_submodule(f"{MLP}.act_fn")
        part.__dict__["forward"] = lambda x: nn.functional.silu(Biased.apply(x))
        return model

    report = prove(lambda: tiny.model("llama"), split, tiny.batch("llama"), mesh=mesh())
    assert report.first == f"{MLP}.act_fn" and "backwards" in str(report), str(report)


@pytest.mark.ranks(2)
def test_other_tokens() -> None:
    def split(model: Any) -> Any:
        plait.parallelize(model, device_mesh=mesh())
        generate = model.generate
        model.__dict__["generate"] = lambda *args, **kwargs: generate(*args, **kwargs) + 1
        return model

    report = prove(lambda: tiny.model("llama"), split, tiny.batch("llama"), mesh=mesh())
    assert [row.kind for row in report.wrong] == ["tokens"] and report.first == ""


@pytest.mark.ranks(2)
def test_a_batch_that_the_whole_model_cannot_run() -> None:
    with pytest.raises(PlaitError, match="cannot run the batch"):
        prove(
            lambda: tiny.model("llama"),
            lambda model: plait.parallelize(model, device_mesh=mesh()),
            {"input_idz": torch.zeros(1, 2)},
            mesh=mesh(),
        )


@pytest.mark.ranks(2)
def test_a_model_that_is_another_on_each_rank(rank: int) -> None:
    with pytest.raises(PlaitError, match="on each rank"):
        prove(
            lambda: tiny.model("llama", seed=rank),
            lambda model: plait.parallelize(model, device_mesh=mesh()),
            tiny.batch("llama"),
            mesh=mesh(),
        )


@pytest.mark.ranks(2)
def test_the_report_is_the_same_on_every_rank_and_collapses_layers() -> None:
    report = proved("llama")
    assert len(set(plait.comm.exchange(str(report.to_dict()), mesh()))) == 1
    names = [row.name for row in report.lines()]
    assert "model.layers.*.self_attn.o_proj" in names
    assert not any(".0." in name for name in names)
    with seeds.borrowed(0):
        assert report.to_dict()["ok"] is True
