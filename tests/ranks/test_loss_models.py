"""Models whose logits stay split in a call with labels: loss and gradients of one process."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import count
from plait.layout import DistributedConfig
from plait.loss import SplitLogits, asking, last_count, split_logits
from plait.loss.labels import Record
from plait.styles import linear_forwards
from plait.testing import add_noise, mutation, parity, tiny

SMALL = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 97}


def other(kind: str) -> nn.Module:
    """A model that `tiny` has not."""
    import transformers

    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=97, d_model=24, d_kv=4, d_ff=24, num_layers=1, num_heads=6,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).double().eval()
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=6,
            intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).double().eval()
    config = tiny.config("llama" if kind == "llama tied" else kind, **EXTRA[kind])
    return tiny.from_config(config)


EXTRA: dict[str, dict[str, Any]] = {
    "llama tied": {"tie_word_embeddings": True, "vocab_size": 97},
    "llama": {"vocab_size": 101},
    "gemma3_text": {"final_logit_softcapping": 5.0, "vocab_size": 97},
    "cohere": {"logit_scale": 0.25},
    "phi3": {},
    "qwen2": {},
}


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    whole = add_noise(other(kind))
    split = copy.deepcopy(whole)
    plait.parallelize(split, **options)
    return split, whole


def batch(size: int = 3, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    made = tiny.batch("llama", size=size, length=length, seed=seed, padded=True)
    return made


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", [*EXTRA, "t5", "bert"])
def test_models(kind: str) -> None:
    split, whole = pair(kind)
    made = batch()
    with count() as seen:
        output = split(**made)
    inside = int(kind == "bert")  # its head has a layer before the last one
    assert type(output.logits) is SplitLogits and seen["all_gather"] == inside, seen
    counted = int((made["labels"] >= 0).sum())
    if kind not in ("t5", "bert"):
        counted = int((made["labels"][:, 1:] >= 0).sum())
    assert last_count(split) == output.loss.__dict__["_plait_tokens"] == counted
    parity.compare(split, whole, made)
    torch.testing.assert_close(output.logits.whole(), whole(**made).logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        asked = split(**made, output_logits=True)
        assert type(asked.logits) is torch.Tensor
        torch.testing.assert_close(asked.logits, output.logits.whole())
        torch.testing.assert_close(asked.loss, split(**made).loss)
        ids = {"input_ids": made["input_ids"]}
        if kind == "t5":
            ids["decoder_input_ids"] = made["input_ids"]
        assert type(split(**ids).logits) is torch.Tensor


@pytest.mark.ranks(2)
def test_other_ways_to_ask() -> None:
    split, whole = pair("llama")
    made = batch()
    shifted = F.pad(made["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for changes in (
        {"num_items_in_batch": torch.tensor(5)},
        {"shift_labels": shifted},
        {"return_dict": False},
    ):
        parity.compare(split, whole, {**made, **changes})
    ids, mask, labels = made["input_ids"], made["attention_mask"], made["labels"]
    by_place = split(ids, mask, None, None, None, labels)
    assert type(by_place.logits) is SplitLogits
    torch.testing.assert_close(by_place.loss, split(**made).loss)

    def doubled(x: torch.Tensor, sizes: Any, mesh: Any, asked: Any) -> torch.Tensor:
        return asking.split_output(x * 2, sizes, mesh, asked)

    with mutation.must_fail(linear_forwards, "split_output", doubled):
        parity.compare(split, whole, made)


@pytest.mark.ranks(2)
def test_a_loss_of_ones_own() -> None:
    split, whole = pair("llama tied")
    made = batch()
    labels = made.pop("labels")

    def own(model: nn.Module) -> torch.Tensor:
        logits = model(**made).logits
        assert (type(logits) is SplitLogits) == (model is split)
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], label_smoothing=0.1)
        return loss + plait.loss.cross_entropy(logits, labels, z_loss=1e-2, reduction="sum")

    with parity.exact(), split_logits(split):
        loss, expected = own(split), own(whole)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        loss.backward()
        expected.backward()
    grads = plait.full_grads(split)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-10)
    assert type(split(**made).logits) is torch.Tensor


class Tail(nn.Module):
    """A language model of no library, with targets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.lm_head = nn.Linear(24, 97, bias=True)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        hidden = self.embed(idx)
        logits = self.lm_head(hidden + self.down(self.up(hidden).relu()))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )


@pytest.mark.ranks(2, 3)
def test_a_module_of_ones_own() -> None:
    torch.manual_seed(0)
    whole = Tail().double()
    split = copy.deepcopy(whole)
    plan = {"up": "colwise", "down": "rowwise", "lm_head": "colwise_gather_output"}
    plait.parallelize(split, tp_plan={**plan, "embed": "embedding_rowwise"})
    idx = batch()["input_ids"]
    for targets in (idx.masked_fill(idx % 5 == 0, -1), None):
        logits, loss = split(idx, targets)
        assert type(logits) is (torch.Tensor if targets is None else SplitLogits)
        if targets is None:
            continue
        expected = whole(idx, targets)[1]
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        loss.backward()
        expected.backward()
        grads = plait.full_grads(split)
        for name, param in whole.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12)
        assert last_count(split) == int((targets >= 0).sum())


def data_parallel(config: Any, kind: str, ranks: int, empty: bool = True) -> tuple[Any, Any, Any]:
    """One step on unequal, partly masked batches of the data ranks, and the whole batch's."""
    split, whole = pair(kind, config=config)
    data = split.__dict__["_plait"].data_mesh
    parts = [batch(size=n + 1, length=5 + n, seed=n) for n in range(ranks)]
    if empty:  # a rank without a token that counts
        parts[-1]["labels"] = torch.full_like(parts[-1]["labels"], -100)
    longest = max(x["input_ids"].shape[1] for x in parts)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    joined = {
        name: torch.cat(
            [F.pad(x[name], (0, longest - x[name].shape[1]), value=value) for x in parts]
        )
        for name, value in fill.items()
    }
    mine = parts[data.get_local_rank()]
    with parity.exact():
        found, expected = split(**mine).loss, whole(**joined).loss
        found.backward()
        expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    counted = int((joined["labels"][:, 1:] >= 0).sum())
    assert last_count(split) == counted
    grads = plait.full_grads(split)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-8, atol=1e-10)
    return split, whole, mine


CASES = {
    2: [{"dp_shard_size": 2}],
    4: [{"dp_shard_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "tp_size": 2}],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["llama tied", "gemma3_text"])
def test_data_parallel(kind: str) -> None:
    for sizes in CASES[dist.get_world_size()]:
        split, _, mine = data_parallel(DistributedConfig(**sizes), kind, 2)
        split.zero_grad()
        with torch.no_grad():
            total = split(**mine, num_items_in_batch=4).loss
        torch.testing.assert_close(total, split(**mine).loss * last_count(split) / 4)
        with plait.gathered(split), torch.no_grad():
            if mine["labels"].max() >= 0:  # only this data rank makes a forward
                split(**mine)
                assert last_count(split) == int((mine["labels"][:, 1:] >= 0).sum())
        # A loss of one's own, of all ranks' tokens as well.
        given = {k: v for k, v in mine.items() if k != "labels"}
        with torch.no_grad(), split_logits(split):
            logits = split(**given).logits[:, :-1].flatten(0, 1)
            own = F.cross_entropy(logits.float(), mine["labels"][:, 1:].flatten())
        torch.testing.assert_close(own, split(**mine).loss.to(own.dtype), rtol=1e-5, atol=1e-5)
    with mutation.must_fail(asking, "Record", lambda *_, **__: Record()):
        sizes = CASES[dist.get_world_size()][0]
        data_parallel(DistributedConfig(**sizes), kind, 2, empty=False)


@pytest.mark.ranks(2)
def test_sixteen_bits_autocast_and_checkpointing() -> None:
    split, whole = pair("llama")
    made = batch()
    for model in (split, whole):
        model.to(torch.bfloat16)
    parity.compare(split, whole, made)
    split, whole = pair("llama")
    for model in (split, whole):
        model.float().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parity.compare(split, whole, made)
    with torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext():
        parity.compare(split, whole, made, tolerance=5e-2)
