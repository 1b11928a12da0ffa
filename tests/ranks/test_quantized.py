"""Quantized weights on split models: the numbers of one process, scales with their blocks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.errors import PlaitError, PlanError
from plait.styles import quantized
from plait.testing import add_noise, mutation, tiny

SIZES = {"hidden_size": 144, "intermediate_size": 192, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3},
    "phi3": {},
}
"""Heads that are shared by ranks; fused weights."""


def torchao_config(kind: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    if kind == "int8":
        return Int8WeightOnlyConfig()
    blocks = PerGroup(16) if kind == "int4 in groups" else PerAxis(0)
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=blocks)


def pair(name: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    pytest.importorskip("torchao")
    from torchao.quantization import quantize_

    whole = add_noise(tiny.model(name, dtype=dtype, **MODELS[name])).eval()
    quantize_(whole, torchao_config(kind))
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(tp_size=dist.get_world_size()))
    return split, whole


def compare(split: Any, whole: Any, name: str, tolerance: float) -> None:
    batch = tiny.batch(name)
    with torch.no_grad():
        found, expected = split(**batch), whole(**batch)
    assert (found.logits - expected.logits).abs().max() <= tolerance * expected.logits.abs().max()
    assert abs(found.loss - expected.loss) <= tolerance * expected.loss


KINDS = ["int8", "int4 in groups", "int4 in rows"]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_tokens_and_weights(name: str, kind: str) -> None:
    if (name, kind, dist.get_world_size()) == ("phi3", "int4 in groups", 2):
        return  # refused, see below
    split, whole = pair(name, kind)
    compare(split, whole, name, 5e-6)
    ids, options = tiny.batch(name)["input_ids"], {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(split.generate(ids, **options), whole.generate(ids, **options))
    found = plait.full_state_dict(split)
    for key, x in whole.state_dict().items():
        assert type(found[key]) is type(x)
        mine, theirs = (t.dequantize() if quantized.is_quantized(t) else t for t in (found[key], x))
        assert torch.equal(mine, theirs), key
    assert plait.held_fraction(split) < 1 / dist.get_world_size() + 0.03
    projection = split.get_submodule("model.layers.0.mlp.down_proj")
    assert quantized.is_quantized(projection.weight._local_tensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    split, whole = pair("llama", kind, torch.bfloat16)
    compare(split, whole, "llama", 3e-2)


@pytest.mark.ranks(2)
def test_gradients_reach_what_is_below() -> None:
    split, whole = pair("llama", "int8")
    for model in (split, whole):
        model(**tiny.batch("llama")).loss.backward()
    grads = plait.full_grads(split)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys() and "model.embed_tokens.weight" in grads
    for key, grad in wanted.items():
        assert (grads[key] - grad).abs().max() <= 2e-5 * grad.abs().max(), key


@pytest.mark.ranks(2)
def test_adapters_on_quantized_layers() -> None:
    peft = pytest.importorskip("peft")
    split, whole = pair("llama", "int8")
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    for model in (split, whole):
        torch.manual_seed(1)
        model.add_adapter(peft.LoraConfig(**options))
    compare(split, whole, "llama", 5e-6)
    for model in (split, whole):
        model(**tiny.batch("llama")).loss.backward()
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            assert (grads[key] - param.grad).abs().max() <= 2e-5 * param.grad.abs().max(), key


@pytest.mark.ranks(2)
def test_blocks_are_not_cut() -> None:
    with pytest.raises(PlanError) as refused:
        pair("phi3", "int4 in groups")
    text = str(refused.value)
    assert "'model.layers.0.mlp.down_proj.weight' over 2 ranks" in text
    assert "one scale for 16 elements along dim 1" in text and "parts of its 48 have 24, 24" in text


@pytest.mark.ranks(2)
def test_what_is_not_saved(tmp_path: Any) -> None:
    split, _ = pair("llama", "int8")
    with pytest.raises(PlaitError, match="quantized"):
        split.save_pretrained(tmp_path / "model")
    with pytest.raises(PlaitError, match="quantized"):
        plait.checkpoint.save(tmp_path / "run", split)
    assert not list(tmp_path.iterdir())
    whole = add_noise(tiny.model("llama", dtype=torch.float32, **MODELS["llama"]))
    from torchao.quantization import quantize_

    quantize_(whole, torchao_config("int8"))
    with pytest.raises(PlaitError, match="quantized"):
        plait.parallelize(whole, plait.DistributedConfig(dp_shard_size=2))


@pytest.mark.ranks(2)
def test_the_comparison_notices() -> None:
    def step() -> None:
        compare(*pair("llama", "int4 in groups"), "llama", 5e-6)

    step()
    with mutation.must_fail(
        quantized,
        "_in_blocks",
        lambda pieces, block: tuple((0, b - a) for a, b in pieces),
        (AssertionError, RuntimeError),
    ):
        step()


class Blocks(nn.Module):
    """Float8 layers of transformers whose kernel is exchanged for plain arithmetic."""

    def __init__(self, into: int, inner: int, out: int, block: tuple[int, int] | None) -> None:
        from transformers.integrations.finegrained_fp8 import FP8Linear

        super().__init__()
        self.up = FP8Linear(into, inner, block_size=block, has_bias=True)
        self.down = FP8Linear(inner, out, block_size=block, has_bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def plainly(x: Any, weight: Any, scales: Any, block: Any, bias: Any = None, *_: Any) -> Any:
    wide = weight.to(torch.float32)
    if block is None:
        wide = wide * scales
    else:
        grown = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = wide * grown[: wide.shape[0], : wide.shape[1]]
    return nn.functional.linear(x, wide, bias)


def float8(sizes: tuple[int, int, int], block: tuple[int, int] | None, monkeypatch: Any) -> Any:
    from transformers.integrations import finegrained_fp8

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", plainly)
    torch.manual_seed(0)
    model = Blocks(*sizes, block)
    for param in model.parameters():
        values = torch.rand(param.shape) + 0.5
        param.data = values.to(param.dtype)
        param.requires_grad_(False)
    return model


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("block", [(8, 8), None], ids=str)
def test_float8_blocks_go_with_their_weights(block: Any, monkeypatch: Any) -> None:
    whole = float8((24, 48, 20), block, monkeypatch)
    split = copy.deepcopy(whole)
    plan = {"up": "colwise", "down": "rowwise"}
    plait.parallelize(split, plait.DistributedConfig(tp_size=dist.get_world_size()), plan)
    x = torch.randn(3, 24)
    assert torch.allclose(split(x), whole(x), rtol=1e-5)
    for key, value in plait.full_state_dict(split).items():
        assert torch.equal(value.float(), whole.state_dict()[key].float()), key
    if block is not None:
        local: Any = split.down.weight_scale_inv
        assert local._local_tensor.shape == (3, 6 // dist.get_world_size())


@pytest.mark.ranks(2)
def test_float8_blocks_are_not_cut(monkeypatch: Any) -> None:
    whole = float8((24, 40, 20), (8, 8), monkeypatch)
    with pytest.raises(PlanError, match=r"parts of its 40 have 20, 20: 20 lie inside of a block"):
        plait.parallelize(
            whole, plait.DistributedConfig(tp_size=2), {"up": "colwise", "down": "rowwise"}
        )
    assert all(type(param) is nn.Parameter for param in whole.parameters())
