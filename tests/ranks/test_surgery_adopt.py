"""What is put into a split model afterwards: the same on all ranks, cut as the plan says."""

import logging
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait import comm
from plait.errors import PlaitError, PlanError, RankError
from plait.state import state_of
from plait.surgery import adopting, watching
from plait.testing import add_noise, mutation, parity, tiny


def rank() -> int:
    return torch.distributed.get_rank()


def split(name: str = "llama", **overrides: Any) -> Any:
    torch.manual_seed(11 + rank())  # new modules differ between the ranks
    return plait.parallelize(add_noise(tiny.model(name, **overrides)))


def first_of(module: nn.Module, mesh: Any) -> dict[str, torch.Tensor]:
    """The plain tensors of the first rank's module, on all."""
    return comm.exchange({n: x.clone() for n, x in module.state_dict().items()}, mesh)[0]


def with_head(model: Any, head: nn.Module) -> Any:
    """The whole model with the head of the first rank."""
    whole = add_noise(tiny.model("llama"))
    whole.lm_head = head
    return whole


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("width", [96, 101])
def test_a_new_head_follows_the_plan(width: int) -> None:
    model = split()
    mesh = state_of(model).tp_mesh
    head = nn.Linear(96, width, bias=True).double()
    optimizer = torch.optim.AdamW(head.parameters())
    weights = first_of(head, mesh)
    model.lm_head = head
    ids = tiny.batch("llama")["input_ids"]
    with torch.no_grad():
        model(ids)
    assert isinstance(head.weight, DTensor) and head.weight.placements[0].is_shard(0)
    assert head.weight.to_local().numel() < head.weight.numel()
    assert optimizer.param_groups[0]["params"] == [head.weight, head.bias]
    assert state_of(model).layouts["lm_head.weight"].shape == (width, 96)
    whole = with_head(model, nn.Linear(96, width, bias=True).double())
    whole.lm_head.load_state_dict(weights)
    parity.compare(model, whole, {"input_ids": ids})
    assert torch.equal(plait.full_state_dict(model)["lm_head.weight"], weights["weight"])
    whole.config.vocab_size = model.config.vocab_size = width
    asked = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids[:1], **asked), whole.generate(ids[:1], **asked))
    assert plait.adopt(model) == (), "nothing is new any more"


@pytest.mark.ranks(2, 3)
def test_a_head_of_several_layers_stays_whole() -> None:
    model = split()
    mesh = state_of(model).tp_mesh

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(96, 8), nn.BatchNorm1d(8), nn.Linear(8, 96)).double().eval()

    head = make()
    head[1].running_mean.normal_()
    weights = first_of(head, mesh)
    model.lm_head = nn.Sequential(nn.Flatten(0, 1), head)
    names = plait.adopt(model)
    assert "lm_head.1.0.weight" in names and len(names) == 6
    assert all(p.placements[0].is_replicate() for p in model.lm_head.parameters())
    whole = with_head(model, nn.Sequential(nn.Flatten(0, 1), make()))
    whole.lm_head[1].load_state_dict(weights)
    parity.compare(model, whole, {"input_ids": tiny.batch("llama")["input_ids"]})


@pytest.mark.ranks(2, 3)
def test_training_a_new_score_keeps_it_the_same() -> None:
    import transformers

    def make() -> Any:
        torch.manual_seed(0)
        auto = transformers.AutoModelForSequenceClassification
        return add_noise(auto.from_config(tiny.config("llama", num_labels=2)).double())

    model = plait.parallelize(make())
    torch.manual_seed(11 + rank())
    model.score = nn.Linear(96, 4, bias=False).double()
    model.num_labels = model.config.num_labels = 4
    weights = first_of(model.score, state_of(model).tp_mesh)
    batch = {"input_ids": tiny.batch("llama", size=1)["input_ids"], "labels": torch.tensor([3])}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # before the first forward
    for _ in range(2):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    score = plait.full_state_dict(model)["score.weight"]
    assert all(torch.equal(x, score) for x in comm.exchange(score, state_of(model).tp_mesh))
    assert not torch.equal(score, weights["weight"]), "the optimizer trains it"

    whole = make()
    whole.score = nn.Linear(96, 4, bias=False).double()
    whole.score.load_state_dict(weights)
    whole.num_labels = whole.config.num_labels = 4
    fresh = plait.parallelize(make())
    fresh.score = nn.Linear(96, 4, bias=False).double()
    fresh.num_labels = fresh.config.num_labels = 4
    plait.adopt(fresh)
    fresh.score.load_state_dict(weights)
    parity.compare(fresh, whole, batch)


@pytest.mark.ranks(2, 3)
def test_layers_inside_follow_the_plan_or_are_refused() -> None:
    model = split()
    mesh = state_of(model).tp_mesh
    layer = model.model.layers[0]
    layer.mlp.up_proj = nn.Linear(96, 48, bias=False).double()
    layer.self_attn.o_proj.weight = nn.Parameter(torch.randn(96, 96, dtype=torch.float64))
    layer.input_layernorm.weight = nn.Parameter(torch.randn(96, dtype=torch.float64))
    new = {
        "mlp.up_proj": layer.mlp.up_proj,
        "self_attn.o_proj": layer.self_attn.o_proj,
        "input_layernorm": layer.input_layernorm,
    }
    weights = {n: first_of(part, mesh)["weight"] for n, part in new.items()}
    plait.adopt(model)
    assert layer.mlp.up_proj.weight.placements[0].is_shard(0)
    assert layer.self_attn.o_proj.weight.placements[0].is_shard(1)
    whole = add_noise(tiny.model("llama"))
    for name, weight in weights.items():
        whole.model.layers[0].get_submodule(name).weight.data.copy_(weight)
    parity.compare(model, whole, tiny.batch("llama"))

    before = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = nn.Sequential(nn.Linear(96, 48, bias=False)).double()
    with pytest.raises(PlanError, match=r"layers\.1\.mlp\.up_proj \(Sequential\)"):
        model(**tiny.batch("llama"))
    model.model.layers[1].mlp.up_proj = before
    parity.compare(model, whole, tiny.batch("llama"))


@pytest.mark.ranks(2)
def test_a_state_of_the_optimizer_that_is_lost_is_told() -> None:
    model = split()
    model.lm_head = nn.Linear(96, 96).double()
    optimizer = torch.optim.Adam(model.lm_head.parameters())
    for param in model.lm_head.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("plait")
    before = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    plait.adopt(model)
    logger.removeHandler(handler)
    logger.setLevel(before)
    assert told and all("Adam had a state for a parameter" in text for text in told)
    assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])


@pytest.mark.ranks(2, 3)
def test_ranks_that_put_in_different_things_are_named() -> None:
    model = split()
    old = model.lm_head
    model.lm_head = nn.Linear(96, 100 + rank()).double()
    begin = time.perf_counter()
    with pytest.raises(RankError, match=rf"rank {rank()}: lm_head.weight is \({100 + rank()}, 96"):
        plait.adopt(model)
    model.lm_head = old
    if rank() == 1:
        model.lm_head = nn.Linear(96, 96).double()
    with pytest.raises(RankError, match="put in on some ranks only"):
        plait.adopt(model)
    with pytest.raises(RankError):
        with torch.no_grad():
            model(torch.ones(1, 3, dtype=torch.long))
    assert time.perf_counter() - begin < 5
    torch.distributed.barrier()


@pytest.mark.ranks(2)
def test_wrong_device_and_parts_of_a_model() -> None:
    model = split()
    with pytest.raises(PlaitError, match="inside a split model"):
        plait.adopt(model.model)
    assert plait.adopt(nn.Linear(2, 2)) == ()
    model.lm_head = nn.Linear(96, 96, device="meta")
    with pytest.raises(PlaitError, match=r"lm_head.weight is .* on meta"):
        plait.adopt(model)


@pytest.mark.ranks(2)
def test_looking_costs_little_and_no_message() -> None:
    model = split()
    model(torch.ones(1, 3, dtype=torch.long))
    begin = time.perf_counter()
    for _ in range(100):
        assert not watching.has_changed(model)
    microseconds = (time.perf_counter() - begin) * 1e4
    assert microseconds < 500
    model.float()
    model.lm_head.weight = model.lm_head.weight
    with comm.count() as tally:
        adopting.adopt_new(model)
    assert not tally.forward


@pytest.mark.ranks(2)
def test_the_broadcast_is_needed() -> None:
    def same() -> None:
        model = split()
        model.lm_head = nn.Sequential(nn.Linear(96, 4)).double()
        plait.adopt(model)
        weight = model.lm_head[0].weight.to_local()
        found = comm.exchange(weight, state_of(model).tp_mesh)
        assert all(torch.equal(x, found[0]) for x in found)

    same()
    with mutation.must_fail(adopting.comm, "broadcast", lambda x, mesh: x):
        same()
