"""`derive` on modules that transformers does not know: plain ones, and ones like remote code."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.build.names import names_of
from plait.plan import ModelNames
from plait.plan.derive import Derived, derive
from plait.plan.derive.structure import _patterns
from plait.plan.rules import generalize, matches

HEADS, KV, DIM, HIDDEN, WIDTH, VOCAB = 6, 3, 4, 24, 48, 96


def block(kind: str, num_heads: int = HEADS, **children: nn.Module | nn.Parameter) -> nn.Module:
    """A module of a class called `kind` that knows its number of heads."""
    module: nn.Module = type(kind, (nn.Module,), {})()
    module.num_heads = num_heads
    for name, child in children.items():
        setattr(module, name, child)
    return module


def linear(width: int, into: int = HIDDEN) -> nn.Linear:
    return nn.Linear(into, width, device="meta")


def attention(kind: str = "Attention", **more: nn.Module | nn.Parameter) -> nn.Module:
    parts = {
        "q_proj": linear(HIDDEN),
        "k_proj": linear(KV * DIM),
        "v_proj": linear(KV * DIM),
        "o_proj": linear(HIDDEN),
    }
    return block(kind, **parts | more)


def of(**children: nn.Module) -> Derived:
    return derive(names_of(block("Model", **children)))


def test_a_plain_transformer_with_names_of_its_own() -> None:
    layers = nn.ModuleList(
        block(
            "Layer",
            att=block("SelfAttention", **{n: linear(HIDDEN) for n in ("wq", "wk", "wv", "wo")}),
            net=nn.Sequential(linear(WIDTH), nn.GELU(), linear(HIDDEN, WIDTH)),
        )
        for _ in range(2)
    )
    table = nn.Embedding(VOCAB, HIDDEN, device="meta")
    head = nn.Linear(HIDDEN, VOCAB, bias=False, device="meta")
    head.weight = table.weight
    found = of(tok_emb=table, layers=layers, readout=head)
    assert found.rules == {
        "tok_emb": "embedding_rowwise",
        "layers.*.att.wq": "colwise",
        "layers.*.att.wk": "colwise",
        "layers.*.att.wv": "colwise",
        "layers.*.att.wo": "rowwise",
        "layers.*.net.0": "colwise",
        "layers.*.net.2": "rowwise",
        "readout": "colwise_gather_output",
    }
    assert found.whole == {}


def test_attention_by_shapes_alone() -> None:
    parts = {name: linear(HIDDEN) for name in ("first", "second", "third", "last_one")}
    found = of(a=block("MyAttention", **parts))
    assert found.rules == {
        "a.first": "colwise",
        "a.second": "colwise",
        "a.third": "colwise",
        "a.last_one": "rowwise",
    }


def test_fused_projections_of_remote_code() -> None:
    fused = linear((HEADS + 2 * KV) * DIM)
    plain = linear(3 * HIDDEN)
    found = of(
        intern=block("InternLM2Attention", wqkv=fused, wo=linear(HIDDEN)),
        baichuan=block("BaichuanAttention", W_pack=plain, o_proj=linear(HIDDEN)),
        qwen=block("QWenAttention", c_attn=plain, c_proj=linear(HIDDEN)),
        glm=block("ChatGLMAttention", query_key_value=plain, dense=linear(HIDDEN)),
        t=block("TAttention", to_q=linear(HIDDEN), to_kv=linear(2 * HIDDEN), to_out=linear(HIDDEN)),
    )
    assert found.rules["intern.wqkv"] == "colwise_qkv_per_group"
    assert found.rules["baichuan.W_pack"] == "colwise_qkv"
    assert found.rules["t.to_kv"] == "colwise_kv"
    assert {found.rules[f"{n}.{o}"] for n, o in (("intern", "wo"), ("t", "to_out"))} == {"rowwise"}


def test_a_fused_width_that_is_not_made_of_heads_is_gathered() -> None:
    found = of(a=block("Attention", qkv=linear(3 * HIDDEN + 1), proj=linear(HIDDEN)))
    assert found.rules == {"a.qkv": "colwise_gather_output", "a.proj": "rowwise_split_input"}
    assert "73 is not made of 6 heads of 4" in found.whole["a"]


def test_mlps_of_remote_code() -> None:
    names = {"w1": linear(WIDTH), "w2": linear(WIDTH), "c_proj": linear(HIDDEN, WIDTH)}
    gated = {"w1": linear(WIDTH), "w3": linear(WIDTH), "w2": linear(HIDDEN, WIDTH)}
    packed = {"w12": linear(2 * WIDTH), "w3": linear(HIDDEN, WIDTH)}
    found = of(
        qwen=block("QWenMLP", **names),
        intern=block("InternLM2MLP", **gated),
        swiglu=block("SwiGLUFFN", **packed),
    )
    assert found.rules == {
        "qwen.w1": "colwise",
        "qwen.w2": "colwise",
        "qwen.c_proj": "rowwise",
        "intern.w1": "colwise",
        "intern.w3": "colwise",
        "intern.w2": "rowwise",
        "swiglu.w12": "packed_colwise",
        "swiglu.w3": "rowwise",
    }


def test_lists_of_experts_and_the_router_before_them() -> None:
    expert = {"gate_proj": WIDTH, "up_proj": WIDTH}
    experts = nn.ModuleList(
        block(
            "ExpertMLP",
            **{name: linear(width) for name, width in expert.items()},
            down_proj=linear(HIDDEN, WIDTH),
        )
        for _ in range(3)
    )
    found = of(moe=block("MoE", gate=linear(3), experts=experts))
    assert found.rules == {
        "moe.experts.*.gate_proj": "colwise",
        "moe.experts.*.up_proj": "colwise",
        "moe.experts.*.down_proj": "rowwise",
    }
    assert "moe.gate" in found.whole


def test_layers_around_other_computing_parts_are_no_mlp() -> None:
    inner = block("Inner", table=nn.Parameter(torch.empty(4, 4, device="meta")))
    found = of(m=block("LatentMLP", down_to=linear(12), inner=inner, back=linear(HIDDEN, 12)))
    assert found.rules == {}
    assert set(found.whole) == {"m.down_to", "m.back", "m.inner"}


def test_norms_between_split_layers() -> None:
    def norm(width: int) -> nn.LayerNorm:
        return nn.LayerNorm(width, device="meta")

    found = of(
        head=attention(q_norm=norm(DIM), k_norm=norm(DIM)),
        full=attention(q_norm=norm(HIDDEN), k_norm=norm(KV * DIM)),
        out=attention(attn_sub_norm=norm(HIDDEN)),
        pre=attention(layer_norm=norm(HIDDEN)),
        mlp=block("MLP", fc1=linear(WIDTH), norm=norm(WIDTH), fc2=linear(HIDDEN, WIDTH)),
    )
    assert {n: s for n, s in found.rules.items() if "norm" in n} == {
        "head.q_norm": "replicated_with_grad_allreduce",
        "head.k_norm": "replicated_with_grad_allreduce",
        "full.q_norm": "split_norm",
        "full.k_norm": "split_norm",
        "out.attn_sub_norm": "split_norm",
        "mlp.norm": "split_norm",
    }


def test_parameters_of_an_attention() -> None:
    def param(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, device="meta"))

    found = of(
        sinks=attention(sinks=param(HEADS), scale=param(DIM)),
        shared=attention(per_dim_scale=param(DIM)),
        bias=attention(bias_u=param(HEADS, DIM)),
        table=attention(bias_table=param(169, HEADS)),
    )
    assert found.rules["sinks"] == "local_params"
    assert found.rules["sinks.sinks"] == found.rules["bias.bias_u"] == "head_params"
    assert found.rules["sinks.scale"] == "replicated_with_grad_allreduce"
    assert found.rules["shared"] == "replicated_with_grad_allreduce"
    assert found.rules["table.q_proj"] == "colwise_gather_output"
    assert "bias_table [169, 6] has a row for every head" in found.whole["table"]


def test_parameters_of_an_activation() -> None:
    found = of(
        one=block("MLP", fc1=linear(WIDTH), act=nn.PReLU(), fc2=linear(HIDDEN, WIDTH)),
        many=block("MLP", fc1=linear(WIDTH), act=nn.PReLU(WIDTH), fc2=linear(HIDDEN, WIDTH)),
    )
    assert found.rules == {
        "one.fc1": "colwise",
        "one.act": "replicated_with_grad_allreduce",
        "one.fc2": "rowwise",
        "many.fc1": "colwise_gather_output",
        "many.fc2": "rowwise_split_input",
    }
    assert "a parameter for every channel" in found.whole["many"]


def test_what_reads_weights_without_calling_stays_whole() -> None:
    found = of(att=nn.MultiheadAttention(HIDDEN, HEADS, device="meta"))
    assert found.rules == {}
    assert "reads the weights" in found.whole["att.out_proj"]


def test_layers_of_one_name_and_two_kinds_get_rules_of_their_own() -> None:
    layers = nn.ModuleList(
        block("Layer", attn=attention("FullAttention" if n % 2 else "LinearAttention"))
        for n in range(4)
    )
    found = of(layers=layers)
    assert found.rules["layers.1.attn.o_proj"] == "rowwise"
    assert found.rules["layers.2.attn.o_proj"] == "rowwise_split_input"
    assert "layers.*.attn.o_proj" not in found.rules


def test_rules_do_not_depend_on_order_of_names_or_on_earlier_calls() -> None:
    model = block("Model", a=attention(), m=block("MLP", fc1=linear(8), fc2=linear(HIDDEN, 8)))
    names = names_of(model)
    turned = ModelNames(
        names.modules, dict(reversed(names.params.items())), names.owners, facts=names.facts
    )
    assert derive(names) == derive(names) == derive(turned)


def test_a_model_without_facts_is_left_whole_or_gathered() -> None:
    names = names_of(block("Model", a=attention()))
    blind = ModelNames(names.modules, names.params, names.owners)
    found = derive(blind)
    assert set(found.rules.values()) == {"colwise_gather_output", "rowwise_split_input"}
    assert "the number of its heads is not known" in found.whole["a"]


def test_an_empty_module() -> None:
    assert derive(names_of(nn.Module())) == Derived({}, {})


def test_patterns_are_as_general_as_they_can_be() -> None:
    found = of(layers=nn.ModuleList(attention() for _ in range(12)))
    assert set(found.rules) == {f"layers.*.{n}_proj" for n in "qkvo"}
    assert all(generalize(rule) == rule for rule in found.rules)
    assert all(matches(rule, rule.replace("*", "11")) for rule in found.rules)


_NUMBERED = st.tuples(*[st.integers(0, 2)] * 3)


@given(st.dictionaries(_NUMBERED, st.sampled_from(["", "colwise", "rowwise"]), min_size=1))
def test_patterns_say_exactly_what_was_decided(decided: dict[tuple[int, ...], str]) -> None:
    named = {f"a.{x}.b.{y}.{z}": style for (x, y, z), style in decided.items()}
    rules = _patterns({name: style for name, style in named.items() if style}, named)
    for name, style in named.items():
        assert {s for rule, s in rules.items() if matches(rule, name)} == ({style} - {""})
