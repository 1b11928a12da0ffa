"""Batches split along the sequence: what each rank gets, and that every token is there once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait.attention import places_of
from plait.errors import LayoutError, PlaitError
from plait.proof.numbers import exact
from plait.state import state_of
from plait.testing import add_noise, tiny
from plait.train import SplitBatch, SplitRules, places_for, split_batch
from plait.train.sequences import shifted
from tests.ranks.test_sequences import Samples, batch_of, part


def places(**sizes: int) -> Any:
    return places_for(plait.DistributedConfig(**sizes))


def whole_of(parts: list[Any], key: str, length: int, cp: int, sp: int) -> torch.Tensor:
    """The parts of all ranks put together again."""
    index = torch.cat([held.index() for held in places_of(length, cp, sp)])
    found = torch.cat([x[key] for x in parts], 1)
    back = torch.empty_like(found)
    back[:, index] = found
    return back


@pytest.mark.ranks(2, 4)
def test_parts_make_the_whole(world_size: int) -> None:
    for cp, sp in ((1, world_size), (world_size, 1), (2, world_size // 2)):
        if cp * sp != world_size:
            continue
        where = places(cp_size=cp, sp_size=sp)
        for length in (7, 15, 32):
            batch = {
                **batch_of("packed", length, 2, 0),
                "boxes": torch.rand(2, length, 4),
                "kinds": torch.arange(3 * 2 * length).view(3, 2, length),
                "pixel_values": torch.rand(2, length),
                "names": ["a", "b"],
            }
            mine = split_batch(batch, where)
            assert isinstance(mine, SplitBatch) and split_batch(mine, where) is mine
            assert mine["pixel_values"].shape[1] == length and mine["names"] == ["a", "b"]
            assert "labels" not in mine and mine["boxes"].shape[1] == mine["kinds"].shape[2]
            parts: list[Any] = [None] * world_size
            dist.all_gather_object(parts, dict(mine))
            for key in ("input_ids", "position_ids"):
                assert torch.equal(whole_of(parts, key, length, cp, sp), batch[key])
            wanted = shifted(batch["labels"], batch["position_ids"])
            assert torch.equal(whole_of(parts, "shift_labels", length, cp, sp), wanted)


def test_labels_are_not_predicted_across_documents() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    assert shifted(labels, positions).tolist() == [[2, -100, 4, 5, -100]]
    assert shifted(labels).tolist() == [[2, 3, 4, 5, -100]]


@pytest.mark.ranks(2)
def test_padding_and_rules() -> None:
    where = places(sp_size=2)
    batch = batch_of("left", 7, 2, 0)
    rules = SplitRules(length=10, pad_token_id=3, dims={"kept": None}, fill={"extra": 9})
    batch |= {"kept": torch.rand(2, 7), "extra": torch.ones(2, 7)}
    mine = split_batch(batch, where, rules)
    assert mine["kept"].shape == (2, 7) and mine["input_ids"].shape == (2, 5)
    if where.sequences.place == 1:
        assert mine["input_ids"][:, 2:].eq(3).all() and mine["extra"][:, 2:].eq(9).all()
        assert mine["attention_mask"][:, 2:].eq(0).all()
        assert mine["shift_labels"][:, 1:].eq(-100).all()
        assert mine["position_ids"][0].tolist() == [5, 6, 7, 8, 9]
    for wrong, match in (
        ({"x": torch.ones(2, 3)}, "none of them is one of input_ids"),
        ([1, 2], "only mappings"),
        (batch_of("full", 12, 1, 0), "sp_seq_length is 10"),
    ):
        with pytest.raises(PlaitError, match=match):
            split_batch(wrong, where, rules)
    with pytest.raises(LayoutError, match="no sequence is split"):
        split_batch(batch, places(dp_shard_size=2))


def own(rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    return [batch_of("full", 6 + rank + number, 1, 10 * rank + number) for number in range(count)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("convention", ["own", "same"])
def test_both_conventions(convention: str, world_size: int) -> None:
    """Unequal numbers of batches: all ranks take the same steps, and each batch is given once."""
    where = places(sp_size=2, dp_shard_size=world_size // 2)
    group, place = dist.get_rank() // 2, where.sequences.place
    if convention == "own":
        data = own(dist.get_rank(), 2 + place + group)
        wanted = [
            x for i in range(9) for r in (2 * group, 2 * group + 1)
            for x in own(r, 2 + r % 2 + group)[i : i + 1]
        ]  # fmt: skip
    else:
        data = wanted = own(group, 2 + group)
    loader = plait.SequenceParallelLoader(data, where)
    found = list(loader)
    assert loader.convention == convention
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, len(found))
    assert len(set(counts)) == 1 and len(found) >= len(wanted)
    for mine, batch in zip(found, wanted, strict=False):
        assert torch.equal(mine["input_ids"], split_batch(batch, where)["input_ids"])
    for spare in found[len(wanted) :]:
        assert spare["shift_labels"].eq(-100).all()
    again = plait.SequenceParallelLoader(data, where)
    running = iter(again)
    for _ in range(2):
        next(running)
    state = again.state_dict()
    resumed = plait.SequenceParallelLoader(data, where)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(found) - 2
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rest, found[2:], strict=True)
    )


@pytest.mark.ranks(2)
def test_a_wrong_convention_and_batches_that_were_not_split() -> None:
    where = places(sp_size=2)
    data = own(dist.get_rank(), 2)
    with pytest.raises(PlaitError, match="given different batches"):
        list(plait.SequenceParallelLoader(data, where, convention="same"))
    with pytest.raises(PlaitError, match="conventions are own and same"):
        plait.SequenceParallelLoader(data, where, convention="both")
    model = plait.parallelize(tiny.model("llama"), plait.DistributedConfig(sp_size=2))
    batch = batch_of("full", 8, 1, 0)
    with pytest.raises(PlaitError, match="all of them were given the same tokens"):
        model(**batch)
    with pytest.raises(PlaitError, match="they were given 3, 5 tokens; of 8 they hold 4, 4"):
        index = [slice(0, 3), slice(3, 8)][dist.get_rank()]
        model(input_ids=batch["input_ids"][:, index])
    with pytest.raises(PlaitError, match="given different arguments"):
        mine, _ = part(batch, model)
        model(**(mine if dist.get_rank() else {"input_ids": mine["input_ids"]}))
    with plait.gathered(model):
        assert model(**batch).logits.shape[1] == 8
    assert model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False).shape == (1, 11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"sp_size": 2}, {"cp_size": 2}], ids=str)
def test_the_hand_written_loss(sizes: dict[str, int]) -> None:
    """As published for accelerate: losses and counts gathered, and weighed by hand."""
    import torch.distributed.nn.functional as gathering

    accelerator = plait.Accelerator(plait.DistributedConfig(**sizes))
    model = accelerator.prepare(add_noise(tiny.model("llama")).train())
    whole = add_noise(tiny.model("llama")).train()
    group = state_of(model).sequences.both.get_group()
    sample = batch_of("full", 11, 1, 3)
    sample["labels"][0, :7] = -100  # one rank of the ring has hardly any token
    with exact():
        batch = plait.split_batch(sample, model)
        targets = batch.pop("shift_labels")
        outputs = model(**batch)
        loss = whole.loss_function(
            logits=outputs.logits, labels=None, shift_labels=targets, vocab_size=96
        )
        loss = torch.nan_to_num(loss)
        losses = gathering.all_gather(loss, group=group)
        count = (targets != -100).sum()
        counts = gathering.all_gather(count, group=group)
        total = sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
        total.backward()
        wanted = whole(**sample).loss
        wanted.backward()
    assert abs(total.item() - wanted.item()) < 1e-10
    grads = plait.full_grads(model)
    for key, param in whole.named_parameters():
        assert (grads[key] - param.grad).abs().max() < 1e-10, key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers(reentrant: bool) -> None:
    grads = []
    for recompute in (False, True):
        model = plait.parallelize(
            add_noise(tiny.model("llama")).train(), plait.DistributedConfig(cp_size=2)
        )
        if recompute:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        mine, _ = part(batch_of("packed", 15, 2, 0), model)
        other = plait.parallelize(tiny.model("llama"), plait.DistributedConfig(sp_size=2))
        loss = model(**mine).loss
        other(**plait.split_batch(batch_of("full", 9, 1, 1), other)).loss.backward()
        loss.backward()  # after another model with another layout has run
        grads.append(plait.full_grads(model))
    for key, x in grads[0].items():
        assert (grads[1][key] - x).abs().max() < 1e-12, key


@pytest.mark.ranks(2)
def test_one_document_or_padded_token_changes_no_other() -> None:
    model = plait.parallelize(add_noise(tiny.model("llama")), plait.DistributedConfig(cp_size=2))
    for kind, changed in (("packed", slice(7, 11)), ("left", slice(0, 5))):
        batch = batch_of(kind, 15, 2, 0)
        before = model(**part(batch, model)[0], output_logits=True).logits
        batch["input_ids"][0, changed] = 11
        mine, index = part(batch, model)
        after = model(**mine, output_logits=True).logits
        same = torch.tensor([not changed.start <= i < changed.stop for i in index.tolist()])
        assert torch.equal(before[0][same], after[0][same]) and torch.equal(before[1], after[1])


@pytest.mark.ranks(2)
def test_what_cannot_be_shared_is_refused_by_name() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "mamba", hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4
    )
    sizes = plait.DistributedConfig(sp_size=2)
    for module, match in (
        (tiny.from_config(config), "does not go through transformers"),
        (torch.nn.Linear(4, 4), "no model of transformers"),
    ):
        with pytest.raises(plait.PlanError, match=match):
            plait.parallelize(module, sizes)
    lfm = AutoConfig.for_model("lfm2", **tiny.SIZES, full_attn_idxs=[1])
    with pytest.raises(plait.PlanError, match="mixes tokens in another way than attention"):
        plait.parallelize(tiny.from_config(lfm), sizes)
    model = tiny.model("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    plait.parallelize(model, sizes)
    with pytest.raises(PlaitError, match="dropout of attention weights"):
        model(**part(batch_of("full", 8, 1, 0), model)[0])
    handler = plait.DeepSpeedSequenceParallelConfig(sp_attn_implementation="flex_attention")
    with pytest.raises(LayoutError, match="flex_attention"):
        config = plait.DistributedConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)
        plait.parallelize(tiny.model("llama"), config)


@pytest.mark.ranks(2)
def test_samples_of_a_fixed_length() -> None:
    handler = plait.SequenceParallelConfig(sp_seq_length=16, sp_seq_length_is_variable=False)
    accelerator = plait.Accelerator(plait.DistributedConfig(sp_size=2, sp_handler=handler))
    data = accelerator.prepare(torch.utils.data.DataLoader(Samples(4), batch_size=2))
    lengths = [batch["input_ids"].shape[1] for batch in data]
    assert lengths == [8, 8] and accelerator.torch_device_mesh["sp"].size() == 2


def bert(kind: str) -> Any:
    from transformers import (
        AutoConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        BertForTokenClassification,
    )

    kinds = {
        "masked": BertForMaskedLM,
        "token": BertForTokenClassification,
        "sequence": BertForSequenceClassification,
    }
    config = AutoConfig.for_model(
        "bert",
        **{**tiny.SIZES, "num_key_value_heads": None},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=96,
    )
    torch.manual_seed(0)
    return add_noise(kinds[kind](config).double()).train()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"sp_size": 2}, {"cp_size": 2}], ids=str)
@pytest.mark.parametrize("kind", ["masked", "token"])
def test_models_that_look_both_ways(kind: str, sizes: dict[str, int]) -> None:
    whole, split = bert(kind), plait.parallelize(bert(kind), plait.DistributedConfig(**sizes))
    batch = batch_of("right", 13, 2, 0)
    with exact():
        mine = split_batch(batch, split, SplitRules(shift=False))
        loss, wanted = split(**mine).loss, whole(**batch).loss
        loss.backward()
        wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-10
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            assert (grads[key] - param.grad).abs().max() < 1e-10, key
    with pytest.raises(PlaitError, match=r"SplitRules\(shift=False\)"):
        split(**split_batch(batch, split))


@pytest.mark.ranks(2)
def test_outputs_that_are_made_of_several_tokens_are_refused() -> None:
    with pytest.raises(plait.PlanError, match=r"one for each token|mixes tokens"):
        plait.parallelize(bert("sequence"), plait.DistributedConfig(sp_size=2))
