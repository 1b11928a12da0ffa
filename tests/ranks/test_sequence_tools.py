"""Around sequences that ranks share: sums over them, adapters, files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait.errors import PlaitError
from plait.proof.numbers import exact
from plait.testing import add_noise, mutation, tiny
from plait.train import sequence_sums
from plait.train.sequences import shifted
from tests.ranks.test_sequences import batch_of

BOTH = [{"sp_size": 2}, {"cp_size": 2}]


def pair(sizes: dict[str, int], **more: Any) -> tuple[Any, Any]:
    whole = add_noise(tiny.model("llama", **more)).train()
    split = plait.parallelize(copy.deepcopy(whole), plait.DistributedConfig(**sizes))
    return split, whole


def same_grads(split: Any, whole: Any) -> None:
    grads = plait.full_grads(split)
    wanted = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for key, grad in wanted.items():
        assert (grads[key] - grad).abs().max() < 1e-10, key


def preference(model: Any, batch: dict[str, torch.Tensor], add_up: Any) -> torch.Tensor:
    """Of two answers, the first is better."""
    targets = batch.pop("shift_labels")
    logps = model(**batch, use_cache=False).logits.log_softmax(-1)
    picked = logps.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    sums = add_up(picked * (targets != -100))
    return -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1]))


def check_preference(sizes: dict[str, int]) -> None:
    split, whole = pair(sizes)
    batch = batch_of("right", 13, 2, 0)
    mine = dict(plait.split_batch(batch, split))
    together = {**batch, "shift_labels": shifted(batch["labels"])}
    del together["labels"]
    with exact():
        loss = preference(split, mine, lambda x: plait.sequence_sum(x, split))
        wanted = preference(whole, together, lambda x: x.sum(1))
        loss.backward()
        wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-10
    same_grads(split, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
def test_a_loss_of_whole_sequences(sizes: dict[str, int]) -> None:
    check_preference(sizes)
    with pytest.raises(PlaitError, match="no dim of tokens"):
        plait.sequence_sum(torch.ones(2), plait.Accelerator(plait.DistributedConfig(**sizes)))


@pytest.mark.ranks(2)
def test_a_sum_whose_gradient_is_not_summed_is_noticed() -> None:
    def once(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None

    with mutation.must_fail(sequence_sums._Sum, "backward", staticmethod(once)):
        check_preference({"sp_size": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
def test_adapters(sizes: dict[str, int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "o_proj", "up_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    around = [
        peft.get_peft_model(model, copy.deepcopy(config), autocast_adapter_dtype=False)
        for model in pair(sizes)
    ]
    around[1].load_state_dict(plait.full_state_dict(around[0]))
    batch = batch_of("left", 13, 2, 0)
    with exact():
        losses = [
            around[0](**plait.split_batch(batch, around[0])).loss,
            around[1](**batch).loss,
        ]
        for loss in losses:
            loss.backward()
    assert abs(losses[0].item() - losses[1].item()) < 1e-10
    same_grads(*around)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", BOTH, ids=str)
def test_a_saved_model_is_an_ordinary_one(sizes: dict[str, int], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found: list[Any] = [tmp_path / "model"]
    dist.broadcast_object_list(found)
    split, whole = pair(sizes, dtype=torch.float32)
    split.save_pretrained(found[0])
    read = AutoModelForCausalLM.from_pretrained(found[0])
    assert read.config._attn_implementation == "sdpa"
    for key, x in whole.state_dict().items():
        assert torch.equal(read.state_dict()[key], x), key
    again = plait.AutoModelForCausalLM.from_pretrained(
        found[0], distributed_config=plait.DistributedConfig(**sizes)
    )
    batch = batch_of("full", 9, 1, 0)
    losses = [m(**plait.split_batch(batch, m)).loss.item() for m in (split, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.ranks(2)
def test_sequences_that_repeat_themselves_are_no_copies() -> None:
    split, whole = pair({"sp_size": 2})
    ids = torch.arange(10, 14).repeat(2, 2)
    batch = {"input_ids": ids, "labels": ids}
    with exact():
        loss = split(**plait.split_batch(batch, split)).loss
        assert abs(loss.item() - whole(**batch).loss.item()) < 1e-10
