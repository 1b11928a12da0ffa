"""Plans that `derive` finds for architectures of transformers, built small on the meta device."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from plait.build.names import names_of
from plait.plan import ModelNames
from plait.plan.derive import Derived, derive
from plait.plan.rules import matches

_SHORT = {
    "col": "colwise",
    "row": "rowwise",
    "gather": "colwise_gather_output",
    "split": "rowwise_split_input",
    "vocab": "embedding_rowwise",
    "sum": "replicated_with_grad_allreduce",
    "qkv": "colwise_qkv",
    "qkv_head": "colwise_qkv_per_head",
    "qkv_group": "colwise_qkv_per_group",
}
COMMON = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GQA = COMMON | {"num_key_value_heads": 3, "head_dim": 4}
GPT2 = {"vocab_size": 96, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32}
BART = {
    "vocab_size": 96,
    "d_model": 24,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 6 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts"), 4),
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}

QKVO = "self_attn.q_proj,k_proj,v_proj:col self_attn.o_proj:row"
GATED = "mlp.gate_proj,up_proj:col mlp.down_proj:row"
LLAMA = f"model embed_tokens:vocab\nmodel.layers.* {QKVO} {GATED}\n lm_head:gather"
_Q_OUT = "q_proj,k_proj,v_proj:col {0}.out_proj:row"
SELF, CROSS = (f"{n}.{_Q_OUT.format(n)}" for n in ("self_attn", "encoder_attn"))
FC = "fc1:col fc2:row"
_BERT_PART = "attention.self.query,key,value:col attention.output.dense:row"
BERT = f"{_BERT_PART} intermediate.dense:col output.dense:row"
GPT2_BLOCK = "attn.c_attn:{} attn.c_proj:row mlp.c_fc:col mlp.c_proj:row"
H4 = "mlp.dense_h_to_4h:col mlp.dense_4h_to_h:row"

# (kind of model, model type, config, rules)
MODELS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "CausalLM",
        "gpt2",
        GPT2,
        f"transformer wte:vocab\ntransformer.h.* {GPT2_BLOCK.format('qkv')}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "gpt_bigcode",
        GPT2 | {"multi_query": True},
        f"transformer wte:vocab\ntransformer.h.* {GPT2_BLOCK.format('qkv')}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "gpt_bigcode",
        GPT2 | {"multi_query": False},
        f"transformer wte:vocab\ntransformer.h.* {GPT2_BLOCK.format('qkv_head')}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "openai-gpt",
        GPT2,
        "transformer tokens_embed:vocab\n"
        f"transformer.h.* {GPT2_BLOCK.format('qkv')}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "gptj",
        GPT2 | {"rotary_dim": 4},
        "transformer wte:vocab\ntransformer.h.* attn.q_proj,k_proj,v_proj:col attn.out_proj:row "
        "mlp.fc_in:col mlp.fc_out:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "codegen",
        GPT2 | {"n_embd": 32, "n_head": 8, "rotary_dim": 4},
        "transformer wte:vocab\ntransformer.h.* attn.qkv_proj:gather attn.out_proj:split "
        "mlp.fc_in:col mlp.fc_out:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "gpt_neox",
        COMMON,
        "gpt_neox embed_in:vocab\ngpt_neox.layers.* attention.query_key_value:qkv_head "
        f"attention.dense:row {H4}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "bloom",
        {"vocab_size": 96, "hidden_size": 24, "n_layer": 2, "n_head": 6},
        "transformer word_embeddings:vocab\n"
        f"transformer.h.* self_attention.query_key_value:qkv_head self_attention.dense:row {H4}\n"
        " lm_head:gather",
    ),
    *(
        (
            "CausalLM",
            "falcon",
            COMMON | own,
            "transformer word_embeddings:vocab\n"
            f"transformer.h.* self_attention.query_key_value:{style} "
            f"self_attention.dense:row {H4}\n lm_head:gather",
        )
        for style, own in {
            "qkv": {"new_decoder_architecture": False, "multi_query": True},
            "qkv_head": {"new_decoder_architecture": False, "multi_query": False},
            "qkv_group": {"new_decoder_architecture": True, "num_kv_heads": 3},
        }.items()
    ),
    (
        "CausalLM",
        "mpt",
        {"vocab_size": 96, "d_model": 24, "n_layers": 2, "n_heads": 6},
        "transformer wte:vocab\ntransformer.blocks.* attn.Wqkv:qkv attn.out_proj:row "
        "ffn.up_proj:col ffn.down_proj:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "opt",
        COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 12},
        f"model.decoder embed_tokens:vocab\nmodel.decoder.layers.* {SELF} {FC}\n lm_head:gather",
    ),
    ("CausalLM", "llama", GQA, LLAMA),
    ("CausalLM", "qwen3", GQA, f"{LLAMA}\nmodel.layers.*.self_attn q_norm,k_norm:sum"),
    ("CausalLM", "olmo2", GQA, f"{LLAMA}\nmodel.layers.*.self_attn q_norm,k_norm:split_norm"),
    (
        "CausalLM",
        "cohere",
        GQA | {"use_qk_norm": True},
        f"{LLAMA}\nmodel.layers.*.self_attn q_norm,k_norm:head_params",
    ),
    (
        "CausalLM",
        "stablelm",
        GQA | {"qk_layernorm": True},
        "model embed_tokens:vocab\nmodel.layers.* self_attn.q_proj,k_proj,v_proj:gather "
        f"self_attn.o_proj:split {GATED}\n lm_head:gather",
    ),
    (
        "CausalLM",
        "bitnet",
        GQA,
        f"{LLAMA}\nmodel.layers.* self_attn.attn_sub_norm:split_norm mlp.ffn_sub_norm:split_norm",
    ),
    (
        "CausalLM",
        "apertus",
        GQA,
        f"model embed_tokens:vocab\nmodel.layers.* {QKVO} self_attn.q_norm,k_norm:sum "
        "mlp.up_proj:col mlp.act_fn:sum mlp.down_proj:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "phi3",
        GQA,
        "model embed_tokens:vocab\nmodel.layers.* self_attn.qkv_proj:qkv self_attn.o_proj:row "
        "mlp.gate_up_proj:packed_colwise mlp.down_proj:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "gpt_oss",
        GQA | {"num_local_experts": 4},
        f"model embed_tokens:vocab\nmodel.layers.* {QKVO} self_attn:local_params "
        "self_attn.sinks:head_params\n lm_head:gather",
    ),
    (
        "CausalLM",
        "deepseek_v3",
        COMMON | MLA,
        "model embed_tokens:vocab\nmodel.layers.* self_attn.q_b_proj,kv_b_proj:col "
        f"self_attn.kv_a_proj_with_mqa:mla_kv_a_proj self_attn.o_proj:row {GATED} "
        "mlp.experts:moe_tp_experts mlp.experts.gate_up_proj:packed_colwise "
        "mlp.experts.down_proj:row mlp.shared_experts.gate_proj,up_proj:col "
        "mlp.shared_experts.down_proj:row\n lm_head:gather",
    ),
    (
        "CausalLM",
        "mamba2",
        COMMON | {"num_heads": 6, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "backbone embeddings:vocab\nbackbone.layers.* mixer.in_proj:gather\n lm_head:gather",
    ),
    (
        "CausalLM",
        "rwkv",
        COMMON | {"attention_hidden_size": 24},
        "rwkv embeddings:vocab\nrwkv.blocks.* attention.key,value,receptance:gather "
        "attention.output:split feed_forward.key:col feed_forward.receptance:gather "
        "feed_forward.value:row\n head:gather",
    ),
    (
        "CausalLM",
        "recurrent_gemma",
        COMMON | {"num_key_value_heads": 1, "lru_width": 24, "num_hidden_layers": 3},
        "model embed_tokens:vocab\nmodel.layers.* temporal_block.linear_x,linear_y:gather "
        "temporal_block.linear_out:split temporal_block.q_proj,k_proj,v_proj:col "
        "temporal_block.o_proj:row mlp_block.gate_proj,up_proj:col mlp_block.down_proj:row\n"
        " lm_head:gather",
    ),
    (
        "CausalLM",
        "bert",
        COMMON | {"is_decoder": True},
        f"bert.embeddings word_embeddings:vocab\nbert.encoder.layer.* {BERT}\n"
        "cls.predictions transform.dense:gather decoder:gather",
    ),
    (
        "MaskedLM",
        "distilbert",
        {"vocab_size": 96, "dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 48},
        "distilbert.embeddings word_embeddings:vocab\n"
        "distilbert.transformer.layer.* attention.q_lin,k_lin,v_lin:col attention.out_lin:row "
        "ffn.lin1:col ffn.lin2:row\n vocab_projector:gather",
    ),
    (
        "MaskedLM",
        "deberta",
        COMMON | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "deberta.embeddings word_embeddings:vocab\n"
        "deberta.encoder.layer.* intermediate.dense:col output.dense:row\n"
        "cls.predictions transform.dense:gather decoder:gather",
    ),
    (
        "Seq2SeqLM",
        "bart",
        BART,
        "model shared:vocab encoder.embed_tokens:vocab decoder.embed_tokens:vocab\n"
        f"model.encoder.layers.* {SELF} {FC}\n"
        f"model.decoder.layers.* {SELF} {CROSS} {FC}\n lm_head:gather",
    ),
    (
        "Seq2SeqLM",
        "t5",
        {"vocab_size": 96, "d_model": 24, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 6}
        | {"feed_forward_proj": "gated-gelu"},
        " shared:vocab encoder.embed_tokens:vocab decoder.embed_tokens:vocab lm_head:gather\n"
        + "\n".join(
            f"{part}.block.*.layer.* SelfAttention.q,k,v:col SelfAttention.o:row "
            "SelfAttention.relative_attention_bias:head_embedding "
            "DenseReluDense.wi_0,wi_1:col DenseReluDense.wo:row"
            for part in ("encoder", "decoder")
        )
        + "\ndecoder.block.*.layer.* EncDecAttention.q,k,v:col EncDecAttention.o:row",
    ),
    (
        "SpeechSeq2Seq",
        "whisper",
        BART | {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
        f"model.encoder.layers.* {SELF} {FC}\nmodel.decoder embed_tokens:vocab\n"
        f"model.decoder.layers.* {SELF} {CROSS} {FC}\n proj_out:gather",
    ),
    (
        "ImageClassification",
        "vit",
        COMMON | {"image_size": 8, "patch_size": 4},
        "vit.layers.* attention.q_proj,k_proj,v_proj:col attention.o_proj:row "
        "mlp.fc1:col mlp.fc2:row",
    ),
    (
        "",
        "clip_vision_model",
        COMMON | {"image_size": 8, "patch_size": 4},
        f"encoder.layers.* {SELF} mlp.fc1:col mlp.fc2:row",
    ),
    (
        "",
        "swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4]},
        "encoder.layers.*.blocks.* attention.q_proj,k_proj,v_proj:gather attention.o_proj:split "
        "mlp.fc1:col mlp.fc2:row",
    ),
]
_IDS = [f"{mt}-{n}" for n, (_, mt, _, _) in enumerate(MODELS)]


@cache
def names(index: int) -> ModelNames:
    kind, model_type, config, _ = MODELS[index]
    auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    with torch.device("meta"):
        return names_of(auto.from_config(transformers.AutoConfig.for_model(model_type, **config)))


@cache
def derived(index: int) -> Derived:
    return derive(names(index))


def written(text: str) -> dict[str, str]:
    """`PREFIX block.a,b:style …` a line → rules; the parts of a list share the block."""
    rules = {}
    for line in text.splitlines():
        prefix, *items = line.split(" ")
        for item in items:
            path, _, style = item.partition(":")
            first, *more = path.split(",")
            block = first.rpartition(".")[0]
            for name in [first, *(f"{block}.{other}" if block else other for other in more)]:
                full = f"{prefix}.{name}" if prefix else name
                rules[full] = _SHORT.get(style, style)
    return rules


@pytest.mark.parametrize("index", range(len(MODELS)), ids=_IDS)
def test_rules_of_an_architecture(index: int) -> None:
    assert derived(index).rules == written(MODELS[index][3])


@pytest.mark.parametrize("index", range(len(MODELS)), ids=_IDS)
def test_rules_name_what_exists_and_never_two_styles_for_one_name(index: int) -> None:
    known = [*names(index).modules, *names(index).params]
    styles: dict[str, set[str]] = {}
    for pattern, style in derived(index).rules.items():
        hits = [name for name in known if matches(pattern, name)]
        assert hits, pattern
        for name in hits:
            styles.setdefault(name, set()).add(style)
    assert all(len(found) == 1 for found in styles.values())


@pytest.mark.parametrize("index", range(len(MODELS)), ids=_IDS)
def test_every_matrix_has_a_rule_or_a_reason(index: int) -> None:
    found = derived(index)
    patterns = [*found.rules, *found.whole]
    for param, shape in names(index).params.items():
        owner = names(index).owners[param]
        if len(shape) > 1:
            assert any(matches(p, owner) or matches(p, param) for p in patterns), param
