"""Models whose sequences ranks share: outputs, losses, gradients and steps of one process."""

from typing import Any

import pytest
import torch

import plait
from plait.attention import places_of
from plait.proof.numbers import exact
from plait.state import state_of
from plait.testing import add_noise, tiny
from tests import attention_models

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
        labels = ids.masked_fill(mask == 0, -100)
        if kind == "left":  # predicted by a token that sees nothing: eager attention sees all then
            labels[0, missing : missing + 1] = -100
        found |= {"attention_mask": mask, "labels": labels}
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
    whole = attention_models.model(name, **fields)
    if kind == "packed":
        plait.use_attention(whole)  # proven by itself in tests/unit/test_hf_attention.py
    split = attention_models.model(name, **fields)
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
        wanted = whole(**together, use_cache=False)
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


MODELS = {
    "gemma3_text": {},  # alternating windows, shorter than a rank's part
    "mistral": {"sliding_window": 9},  # longer than a rank's part
    "qwen2": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 1},
    "phi3": {},
    "olmo2": {"num_key_value_heads": 24},
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, world_size: int) -> None:
    kinds = ("full", "packed", "left", "right")
    cases = [(7, 1), (15, 2), (30, 3), (32, 1)]
    for number, sizes in enumerate(LAYOUTS[world_size]):
        turn = number + list(MODELS).index(name)
        length, rows = cases[turn % 4]
        check(name, sizes, kinds[(turn + world_size) % 4], length, rows, **MODELS[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", LAYOUTS[2], ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "gemma2", "mixtral", "cohere"])
def test_more_models(name: str, sizes: dict[str, int]) -> None:
    """Sinks, chunks, soft caps, experts. (One process runs GPT-OSS across packed documents.)"""
    for kind in ("right" if name == "gpt_oss" else "packed", "left"):
        check(name, sizes, kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", LAYOUTS[2], ids=str)
def test_bfloat16(sizes: dict[str, int]) -> None:
    whole = attention_models.model("llama", dtype=torch.bfloat16)
    split = plait.parallelize(
        attention_models.model("llama", dtype=torch.bfloat16), plait.DistributedConfig(**sizes)
    )
    batch = batch_of("left", 15, 2, 0)
    loss, wanted = split(**part(batch, split)[0]).loss, whole(**batch).loss
    loss.backward()
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 0.03
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        size = param.grad.abs().max()
        assert (grads[key] - param.grad).abs().max() < 0.1 * size + 1e-3, key


class Samples(torch.utils.data.Dataset[Any]):
    """Sequences of one length, some of whose labels count."""

    def __init__(self, count: int, length: int = 11) -> None:
        self.rows = [batch_of("full", length, 1, seed) for seed in range(count)]
        for number, row in enumerate(self.rows):
            row["labels"][0, : number % length] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {key: x[0] for key, x in self.rows[at].items()}


def trained(sizes: dict[str, int], steps: int, accumulate: int = 1) -> Any:
    """Weights and losses after training over a layout by the plain loop."""
    accelerator = plait.Accelerator(
        plait.DistributedConfig(**sizes), gradient_accumulation_steps=accumulate
    )
    model = add_noise(tiny.model("llama")).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = accelerator.num_data_ranks
    data = torch.utils.data.DataLoader(Samples(steps * 2), batch_size=2 // ranks)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    with exact():
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.item())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return plait.full_state_dict(model), losses


def alone(steps: int, accumulate: int = 1) -> Any:
    """The same in one process."""
    model = add_noise(tiny.model("llama")).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(torch.utils.data.DataLoader(Samples(steps * 2), batch_size=2))
    losses = []
    with exact():
        for start in range(0, len(data), accumulate):
            window = data[start : start + accumulate]
            counts = [int((x["labels"][:, 1:] != -100).sum()) for x in window]
            for batch, count in zip(window, counts, strict=True):
                loss = model(**batch).loss
                losses.append(loss.item())
                (loss * count / sum(counts)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), losses


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_plain_loop_trains_as_one_process(accumulate: int, world_size: int) -> None:
    wanted, losses = alone(4, accumulate)
    for sizes in LAYOUTS[world_size]:
        found, mine = trained(sizes, 4, accumulate)
        assert max(abs(a - b) for a, b in zip(mine, losses, strict=True)) < 1e-10
        for key, x in wanted.items():
            assert (found[key] - x).abs().max() < 1e-10, key
