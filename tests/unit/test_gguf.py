"""GGUF files: config, tokenizer and weights equal those of plain transformers."""

import numpy as np
import pytest
import torch
import transformers

import plait
from plait.errors import WeightsError
from plait.hf.gguf import gguf_config, gguf_conversion, gguf_tokenizer
from plait.plan.intervals import even
from plait.weights import load, open_checkpoint

gguf = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind  # noqa: E402

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS, WORDS, EXPERTS = 64, 4, 2, 16, 96, 2, 40, 3
EXPERT_MLP = 768  # transformers reads no other width from a GGUF file
BLOCK = {
    "attn_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
    "attn_q.weight": (HEADS * HEAD, WIDTH),
    "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
}
DENSE = {"ffn_gate.weight": (MLP, WIDTH), "ffn_up.weight": (MLP, WIDTH)}
DENSE["ffn_down.weight"] = (WIDTH, MLP)
QK_NORM = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
POST_NORM = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
BIAS = {"attn_q.bias": (HEADS * HEAD,), "attn_k.bias": (KV_HEADS * HEAD,)}
BIAS["attn_v.bias"] = (KV_HEADS * HEAD,)
MOE = {
    "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "ffn_gate_exps.weight": (EXPERTS, EXPERT_MLP, WIDTH),
    "ffn_up_exps.weight": (EXPERTS, EXPERT_MLP, WIDTH),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, EXPERT_MLP),
}
ARCHS = {
    "llama": BLOCK | DENSE,
    "qwen2": BLOCK | DENSE | BIAS,
    "qwen3": BLOCK | DENSE | QK_NORM,
    "gemma3": BLOCK | DENSE | QK_NORM | POST_NORM,
    "qwen3moe": BLOCK | MOE | QK_NORM,
}


def write(path, arch, tied=False):
    """A small random model as the usual converter writes it."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(HEAD)
    if arch == "llama":
        writer.add_rope_dimension_count(HEAD)
    if arch == "gemma3":
        writer.add_sliding_window(16)
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_MLP)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "o", "1", "wo", *(f"word{i}" for i in range(4, WORDS))])
    writer.add_token_merges(["w o"])
    writer.add_eos_token_id(4)
    tensors = {"token_embd.weight": (WORDS, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        tensors["output.weight"] = (WORDS, WIDTH)
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in ARCHS[arch].items()}
    kinds = [Kind.Q8_0, Kind.F16, Kind.Q4_0]
    for i, (name, shape) in enumerate(tensors.items()):
        x = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, x)
            continue
        kind = kinds[i % 3]
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_file(path):
    config = gguf_config(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with open_checkpoint(path) as checkpoint:
        conversion = gguf_conversion(model, checkpoint)
        report = load(model, checkpoint, conversion.recipes)
    return model, conversion, report


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "qwen3moe"])
def test_config_and_weights_equal_plain_transformers(tmp_path, arch):
    path = write(tmp_path / "m.gguf", arch, tied=arch == "gemma3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours, conversion, report = from_file(path)
    skip = {"_name_or_path", "dtype", "transformers_version", "quantization_config"}
    a, b = ours.config.to_dict(), theirs.config.to_dict()
    assert {k: v for k, v in a.items() if k not in skip} == {
        k: v for k, v in b.items() if k not in skip
    }
    assert (conversion.missing, conversion.unexpected, report.missing) == ((), (), ())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x.float()), name


def test_head_width_of_qwen3_is_read_where_transformers_takes_its_default(tmp_path):
    path = write(tmp_path / "m.gguf", "qwen3")
    ours, conversion, _ = from_file(path)
    assert ours.config.head_dim == HEAD
    assert (conversion.missing, conversion.unexpected) == ((), ())
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.read("blk.1.attn_k.weight", dtype=torch.float32)
    assert torch.equal(ours.model.layers[1].self_attn.k_proj.weight, stored)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen3moe"])
@pytest.mark.parametrize("dim", [0, -1])
def test_slices_read_only_their_rows(tmp_path, arch, dim):
    path = write(tmp_path / "m.gguf", arch)
    whole, conversion, _ = from_file(path)
    for name, recipe in conversion.recipes.items():
        x = whole.state_dict()[name]
        layout = even(x.shape, dim, 3)
        read = 0
        for rank in range(3):
            with open_checkpoint(path) as checkpoint:
                piece = recipe.read(checkpoint, layout.dim, layout.pieces_of(rank), torch.float32)
                read += checkpoint.bytes_read
                total = sum(checkpoint.nbytes(key) for key in recipe.names())
            start = sum(layout.sizes[:rank])
            assert torch.equal(piece, x.narrow(dim, start, layout.sizes[rank])), name
        assert total - 3 <= read <= total, name


def test_mutation_without_the_exchange_of_rotary_rows(tmp_path):
    path = write(tmp_path / "m.gguf", "llama")
    whole, conversion, _ = from_file(path)
    name = "model.layers.0.self_attn.k_proj.weight"
    with open_checkpoint(path) as checkpoint:
        plain = conversion.recipes[name].parts()[0].read(checkpoint)
    assert not torch.equal(plain, whole.state_dict()[name])


def test_tokenizer_equals_plain_transformers(tmp_path):
    path = write(tmp_path / "m.gguf", "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = gguf_tokenizer(path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.eos_token == theirs.eos_token == "word4"
    assert ours("wo1").input_ids == theirs("wo1").input_ids == [3, 2]


def test_unknown_architectures_and_damaged_files(tmp_path):
    path = write(tmp_path / "m.gguf", "llama")
    whole, _, _ = from_file(path)
    raw = path.read_bytes()
    (tmp_path / "short.gguf").write_bytes(raw[:-100])
    with pytest.raises(WeightsError, match=f"file at byte {len(raw) - 100}"):
        open_checkpoint(tmp_path / "short.gguf")
    with open_checkpoint(path) as checkpoint:
        checkpoint.metadata["general.architecture"] = "rwkv7"
        with pytest.raises(WeightsError, match="'rwkv7'; known are"):
            gguf_conversion(whole, checkpoint)
    (tmp_path / "odd.gguf").write_bytes(raw.replace(b"llama", b"xlama"))
    with pytest.raises(WeightsError, match="xlama"):
        gguf_config(tmp_path / "odd.gguf")


def test_what_was_read_in_one_process_can_be_saved(tmp_path):
    path = write(tmp_path / "m.gguf", "llama")
    model = plait.AutoModelForCausalLM.from_pretrained(str(path))
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(again.state_dict()[k], x) for k, x in model.state_dict().items())
