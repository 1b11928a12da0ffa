"""Rows of several documents give what each document gives alone."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.proof.numbers import exact
from plait.testing import add_noise, tiny
from plait.train import packing


@dataclass
class Listed:
    """Documents held in lists; tokens with a 0 in `learned` are no labels."""

    ids: list[list[int]]
    learned: list[list[int]] | None = None

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(x) for x in self.ids], dtype=np.int64)

    @property
    def masked(self) -> bool:
        return self.learned is not None

    def piece(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(self.ids[document][start:stop], dtype=np.int32)
        if self.learned is None:
            return ids, ids
        return ids, np.where(np.array(self.learned[document][start:stop]) != 0, ids, -100)


def documents(*lengths: int, seed: int = 0) -> Listed:
    draw = np.random.default_rng(seed)
    return Listed([draw.integers(3, 95, length).tolist() for length in lengths])


lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@given(lengths_of, st.integers(2, 12), st.sampled_from(["cut", "whole", "none"]))
def test_every_token_is_laid_down_once_and_rows_are_never_too_long(lengths, seq_length, way):
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    plan = packing.WAYS[way](lengths, order, seq_length)
    placed = [
        (document, place)
        for row in plan.rows
        for document, start, stop in row
        for place in range(start, stop)
    ]
    assert len(set(placed)) == len(placed)
    assert len(placed) + plan.dropped_tokens == sum(lengths)
    sizes = [sum(stop - start for _, start, stop in row) for row in plan.rows]
    assert max(sizes) <= seq_length
    if way == "cut":
        assert plan.dropped_tokens == 0 and all(size == seq_length for size in sizes[:-1])
    else:
        assert sorted(n for row in plan.rows for n, _, _ in row) == list(range(len(lengths)))
        assert all(start == 0 for row in plan.rows for _, start, _ in row)


def test_whole_documents_take_the_fullest_row_with_room():
    plan = packing.whole([5, 6, 3, 4, 2, 9], range(6), 8)
    assert plan.rows == [[(0, 0, 5), (2, 0, 3)], [(1, 0, 6), (4, 0, 2)], [(3, 0, 4)], [(5, 0, 8)]]
    assert plan.dropped_tokens == 1


def test_positions_restart_and_no_label_crosses_a_border():
    rows = packing.Rows(documents(3, 4, 5), 8, "cut", pad_token=1)
    first, last = rows[0], rows[1]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert (first["labels"] == -100).nonzero().flatten().tolist() == [0, 3, 7]
    assert last["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert last["input_ids"][4:].tolist() == [1] * 4
    assert (last["labels"] == -100).nonzero().flatten().tolist() == [0, 4, 5, 6, 7]
    assert rows.num_tokens == 12 and len(rows) == 2


def test_rows_without_a_label_are_left_out():
    told = Listed([[5, 6, 7], [8, 9, 10], [11]], [[0, 0, 0], [0, 1, 1], [1]])
    rows = packing.Rows(told, 4, "none")
    assert len(rows) == 1 and rows.empty_rows == 2
    assert rows[0]["labels"].tolist() == [-100, 9, 10]
    batch = packing.Collate()([rows[0]])
    assert packing.num_labels(batch) == 2
    assert packing.num_labels(packing.Collate()([packing.empty_like(rows[0])])) == 0


def test_batches_without_packing_are_padded_on_the_right():
    rows = packing.Rows(documents(2, 5), 8, "none")
    batch = packing.Collate(pad_token=1)([rows[0], rows[1]])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["input_ids"][0, 2:].tolist() == [1, 1, 1]
    assert batch["labels"][0, 2:].tolist() == [-100] * 3


def packed_and_apart(model: Any, rows: packing.Rows) -> tuple[list[torch.Tensor], ...]:
    """The logits of each document's piece in its packed row, and when it is alone."""
    batch = packing.Collate()([rows[n] for n in range(len(rows))])
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    with exact():
        logits = model(**given, use_cache=False).logits
        together, alone = [], []
        for number, row in enumerate(rows.plan):
            at = 0
            for document, start, stop in row:
                together.append(logits[number, at : at + stop - start])
                at += stop - start
                ids, _ = rows.documents.piece(document, start, stop)
                alone.append(model(torch.tensor(ids)[None].long()).logits[0])
    return together, alone


@pytest.mark.parametrize("way", ["cut", "whole"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mistral", "phi3"])
def test_packed_logits_are_those_of_separate_runs(name, attention, way):
    model = add_noise(tiny.model(name, attn_implementation=attention))
    rows = packing.Rows(documents(3, 7, 1, 6, 9), 11, way)
    assert max(len(row) for row in rows.plan) > 1
    with torch.no_grad():
        together, alone = packed_and_apart(model, rows)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_the_comparison_sees_positions_that_do_not_restart():
    model = add_noise(tiny.model("llama"))
    rows = packing.Rows(documents(3, 7), 10, "cut")
    make = packing.Rows.__getitem__

    class Wrong(packing.Rows):
        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            made = make(self, row)
            return {**made, "position_ids": torch.arange(len(made["position_ids"]))}

    wrong = copy.copy(rows)
    wrong.__class__ = Wrong
    with torch.no_grad():
        together, alone = packed_and_apart(model, wrong)
    assert (together[0] - alone[0]).abs().max() < 1e-11
    assert (together[1] - alone[1]).abs().max() > 1e-3


@pytest.mark.parametrize("way", ["cut", "whole"])
def test_the_packed_loss_and_gradient_are_the_documents_own(way):
    model = add_noise(tiny.model("llama"))
    rows = packing.Rows(documents(3, 7, 4), 8, way)
    batch = packing.Collate()([rows[n] for n in range(len(rows))])
    with exact():
        model(**batch, use_cache=False).loss.backward()
        packed = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        total, count = 0.0, 0
        for document, start, stop in (span for row in rows.plan for span in row):
            ids, _ = rows.documents.piece(document, start, stop)
            if stop - start > 1:
                ids = torch.tensor(ids)[None].long()
                total = total + model(ids, labels=ids).loss * (stop - start - 1)
                count += stop - start - 1
        (total / count).backward()
    assert count == packing.num_labels(batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=0, atol=1e-11)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_packed_rows_of_a_split_model(name):
    import plait
    from plait.testing import parity

    model = add_noise(tiny.model(name))
    split = copy.deepcopy(model)
    plait.parallelize(split)
    rows = packing.Rows(documents(3, 7, 1, 6, 9), 11, "cut")
    batch = packing.Collate()([rows[n] for n in range(len(rows))])
    parity.compare(split, model, {**batch, "use_cache": False})
    with torch.no_grad():
        together, alone = packed_and_apart(split, rows)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
