"""Models whose sequences ranks share: outputs, losses, gradients and steps of one process."""

from typing import Any

import pytest
import torch

import plait
from plait.attention import places_of
from plait.proof.numbers import exact
from plait.state import state_of
from plait.testing import add_noise, tiny

LAYOUTS = {
    2: [{"sp_size": 2}, {"cp_size": 2}],
    3: [{"sp_size": 3}, {"cp_size": 3}],
    4: [
        {"sp_size": 2, "cp_size": 2},
        {"dp_shard_size": 2, "sp_size": 2},
        {"cp_size": 2, "tp_size": 2},
        {"dp_replicate_size": 2, "cp_size": 2},
        {"sp_size": 4},
    ],
}


def batch_of(kind: str, length: int, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of whole sequences, with labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 90, (rows, length), generator=draw)
    found = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        missing = max(1, length // 3)
        mask[0, slice(0, missing) if kind == "left" else slice(-missing, None)] = 0
        found |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        starts = sorted({0, 1, 2, length // 2, (3 * length) // 4} & set(range(length)))
        ends = [*starts[1:], length]
        positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, ends, strict=True)])
        labels = ids.clone()
        labels[:, starts] = -100
        found |= {"position_ids": positions.expand(rows, -1), "labels": labels}
    return found


def part(batch: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    axes = state_of(model).sequences
    mine = places_of(batch["input_ids"].shape[1], axes.cp_size, axes.sp_size)[axes.place].index()
    return {key: x[:, mine] for key, x in batch.items()}, mine


def check(
    name: str, sizes: dict[str, int], kind: str, length: int = 15, rows: int = 2, **fields: Any
) -> None:
    whole = add_noise(tiny.model(name, **fields)).train()
    whole.set_attn_implementation("plait" if kind == "packed" else "sdpa")
    split = add_noise(tiny.model(name, **fields)).train()
    plait.parallelize(split, plait.DistributedConfig(**sizes))
    state = state_of(split)
    groups = 1 if state.sequences.samples is None else state.sequences.samples.size()
    group = 0 if groups == 1 else state.sequences.samples.get_local_rank()
    batches = [batch_of(kind, length, rows, seed) for seed in range(groups)]
    mine, index = part(batches[group], split)
    with exact():
        output = split(**mine, output_logits=True)
        output.loss.backward()
    together = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    with exact():
        wanted = whole(**together)
        wanted.loss.backward()
    assert abs(output.loss.item() - wanted.loss.item()) < 1e-10
    rows_of = slice(group * rows, (group + 1) * rows)
    seen = torch.ones(rows, len(index), dtype=torch.bool)
    if "attention_mask" in mine:
        seen = mine["attention_mask"].bool()
    difference = (output.logits - wanted.logits[rows_of][:, index])[seen]
    assert not difference.numel() or difference.abs().max() < 1e-10
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            assert (grads[key] - param.grad).abs().max() < 1e-10, key


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["full", "left", "right", "packed"])
def test_llama(kind: str, world_size: int) -> None:
    for sizes in LAYOUTS[world_size]:
        check("llama", sizes, kind)
