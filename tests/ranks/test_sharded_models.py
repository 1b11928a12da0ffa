"""Models sharded over data ranks: reading, saving, generating, changing, guarding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import plait
from plait.state import own_class, pieces_of, state_of
from plait.testing import add_noise, tiny

UNEVEN = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 97,
}
LAYOUTS = {2: [(1, 2, 1), (2, 1, 1)], 3: [(1, 3, 1)], 4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)]}


def config_of(layout: tuple[int, int, int], **more: Any) -> plait.DistributedConfig:
    names = ("dp_replicate_size", "dp_shard_size", "tp_size")
    return plait.DistributedConfig(**dict(zip(names, layout, strict=True)), **more)


def stored(folder: Path, name: str = "llama", **sizes: Any) -> Any:
    """A whole model, and its checkpoint in `folder`, the same for all ranks."""
    model = add_noise(tiny.model(name, dtype=torch.float64, **sizes))
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def read(folder: Path, config: plait.DistributedConfig, **options: Any) -> Any:
    auto = plait.AutoModelForCausalLM
    options = {"dtype": torch.float64} | options
    return auto.from_pretrained(str(folder), distributed_config=config, **options)


def same(model: Any, whole: Any, factor: int = 1) -> bool:
    state = plait.full_state_dict(model)
    return all(torch.equal(state[k], factor * v) for k, v in whole.state_dict().items())


@pytest.mark.ranks(2, 3, 4)
def test_each_rank_reads_its_chunk_and_all_is_written_again(tmp_path: Path) -> None:
    for name, sizes in (("llama", UNEVEN | {"tie_word_embeddings": True}), ("phi3", {})):
        whole = stored(tmp_path / name, name, **sizes)
        for layout in LAYOUTS[dist.get_world_size()]:
            model = read(tmp_path / name, config_of(layout))
            assert same(model, whole)
            _, shards, tp = layout
            report = model._plait_report
            assert report.bytes_read < report.total_bytes * (1 / (shards * tp) + 0.12)
            assert plait.held_fraction(model) < 1 / (shards * tp) + 0.12
            model(**tiny.batch(name, size=1, length=5)).loss.backward()  # FSDP has run once
            out = tmp_path / f"{name}-{'-'.join(map(str, layout))}"
            model.save_pretrained(out)
            again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
            assert type(again) is type(whole)
            assert again.config.architectures == [type(whole).__name__]
            assert all(torch.equal(again.state_dict()[k], v) for k, v in whole.state_dict().items())


@pytest.mark.ranks(4)
def test_whole_tensors_are_loaded_into_chunks(tmp_path: Path) -> None:
    whole = stored(tmp_path, **UNEVEN)
    model = read(tmp_path, config_of((1, 2, 2)))
    for _ in range(2):  # before the first forward, and after it
        model.load_state_dict({k: 2 * v for k, v in whole.state_dict().items()})
        assert same(model, whole, 2)
        model.load_state_dict(whole.state_dict())
        assert same(model, whole)
        model(**tiny.batch("llama", size=1, length=5)).loss.backward()


@pytest.mark.ranks(4)
def test_the_pieces_of_all_ranks_tile_every_parameter() -> None:
    for name, sizes in (("llama", UNEVEN), ("phi3", {}), ("qwen2", {"vocab_size": 97})):
        whole = add_noise(tiny.model(name, dtype=torch.float64, **sizes))
        model = copy.deepcopy(whole)
        plait.parallelize(model, config_of((1, 2, 2)))
        values = dict(whole.named_parameters())
        for key, param in model.named_parameters():
            local = param.to_local().detach()
            mine = pieces_of(param, state_of(model).layouts[key])
            seen = torch.zeros(values[key].shape)
            for piece in mine:
                box = tuple(
                    slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True)
                )
                assert torch.equal(values[key][box], piece.of(local))
                seen[box] += 1
            assert float(seen.sum()) == local.numel()
            dist.all_reduce(seen)
            layout = state_of(model).layouts[key]
            assert (seen == (1 if layout.dim is not None else 2)).all(), key


@pytest.mark.ranks(2, 4)
def test_each_data_rank_generates_as_long_as_it_likes(tmp_path: Path) -> None:
    whole = stored(tmp_path, **UNEVEN).eval()
    for layout in LAYOUTS[dist.get_world_size()]:
        model = read(tmp_path, config_of(layout))
        rank = state_of(model).data_mesh.get_local_rank()
        ids = {"input_ids": tiny.batch("llama", size=1, length=3 + rank)["input_ids"]}
        options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False}
        expected = whole.generate(**ids, **options)
        assert torch.equal(model.generate(**ids, **options), expected)
        with plait.gathered(model), torch.no_grad():
            for _ in range(rank + 1):
                logits = model(**ids).logits
        assert (logits - whole(**ids).logits).abs().max() < 1e-12
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held < 0.6 * sum(p.numel() for p in whole.parameters()) or layout == (2, 1, 1)
        model.train()(**ids, labels=ids["input_ids"]).loss.backward()  # and trains on
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks(2)
def test_what_a_sharded_model_refuses(tmp_path: Path) -> None:
    stored(tmp_path)
    model = read(tmp_path, config_of((1, 2, 1)))
    with pytest.raises(plait.PlaitError, match="sharded over data ranks") as found:
        model.resize_token_embeddings(100)
    assert own_class(model).__name__ in str(found.value) or "resize" in str(found.value)
    model.to(torch.float32)  # before the first forward
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(**tiny.batch("llama", size=1, length=5)).loss.backward()
    with pytest.raises(plait.PlaitError, match="FSDP has noted their dtype"):
        model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.to(torch.float32)
    model.lm_head = nn.Linear(96, 96, bias=False)
    with pytest.raises(plait.PlaitError, match="in no group of FSDP"):
        model(**tiny.batch("llama", size=1, length=5))


@pytest.mark.ranks(4)
def test_initial_values_are_those_of_one_process_whatever_the_seeds() -> None:
    config = tiny.config("llama", **UNEVEN)
    for layout in LAYOUTS[4]:
        torch.manual_seed(5 if dist.get_rank() == 0 else 100 + dist.get_rank())
        auto = plait.AutoModelForCausalLM
        model = auto.from_config(config, distributed_config=config_of(layout))
        torch.manual_seed(5)
        assert same(model, transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.ranks(4)
def test_the_guard_of_a_sharded_model(rank: int, tmp_path: Path) -> None:
    stored(tmp_path)
    model = read(tmp_path, config_of((1, 2, 2), consistency_guard=True))
    data = state_of(model).data_mesh.get_local_rank()
    batch = tiny.batch("llama", size=1, length=6, seed=data)  # data ranks may differ
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
    batch["input_ids"][0, 0] = rank % 2 + 3
    with pytest.raises(plait.RankError, match=r"guard of LlamaForCausalLM: input_ids differs"):
        model(**batch)


class MixedDtypes(nn.Module):
    """A layer list whose norms stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), Float32Norm()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Float32Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(8, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


@pytest.mark.ranks(2)
def test_groups_of_one_dtype_each() -> None:
    torch.manual_seed(0)
    whole = MixedDtypes()
    model = copy.deepcopy(whole)
    plait.parallelize(model, config_of((1, 2, 1)))
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    model(x).float().pow(2).mean().backward()
    whole(x).float().pow(2).mean().backward()
    grads = plait.full_grads(model)
    for key, param in whole.named_parameters():
        assert grads[key].dtype == param.dtype
        assert (grads[key] - param.grad).abs().max() <= 1e-2 * param.grad.abs().max()
    lone = nn.Linear(8, 8)
    lone.bias = nn.Parameter(lone.bias.detach().double())
    with pytest.raises(plait.PlanError, match="several dtypes: float32, float64"):
        plait.parallelize(lone, config_of((1, 2, 1)))
