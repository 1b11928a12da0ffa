"""transformers' models with plait's attention on one rank: eager attention, documents apart."""

from typing import Any

import pytest
import torch

import plait
from plait.attention import MaskSpec
from plait.errors import PlanError
from plait.hf.attention.closures import meaning_of
from plait.proof.numbers import exact
from plait.testing import mutation
from tests import attention_models

NAMES = ["llama", "gemma3_text", "mistral", "gpt_oss", "llama4_text", "phi3", "cohere", "gemma2"]
LENGTHS = (5, 1, 6)


def model_of(name: str, attention: str) -> Any:
    model = attention_models.model(name)
    if attention == "plait":
        return plait.use_attention(model)
    model.set_attn_implementation(attention)
    return model


def ids_of(rows: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(10, 90, (rows, sum(LENGTHS)), generator=draw)


def compare(name: str, batch: dict[str, torch.Tensor], seen: torch.Tensor | None = None) -> None:
    found, wanted = model_of(name, "plait"), model_of(name, "eager")
    with exact():
        outputs = [m(**batch, use_cache=False) for m in (found, wanted)]
        for output in outputs:
            output.loss.backward()
    assert abs(outputs[0].loss - outputs[1].loss) < 1e-11
    difference = outputs[0].logits - outputs[1].logits
    assert (difference if seen is None else difference[seen]).abs().max() < 1e-11
    for (key, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None and (mine.grad - other.grad).abs().max() < 1e-11, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["full", "left", "right", "packed"])
def test_it_is_eager_attention(name: str, kind: str) -> None:
    ids = ids_of()
    batch, seen = {"input_ids": ids, "labels": ids.clone()}, None
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, slice(0, 4) if kind == "left" else slice(-4, None)] = 0
        seen = mask.bool()
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 4] = -100  # predicted by a token that sees nothing: eager attention sees all then
        batch |= {"attention_mask": mask, "labels": labels}
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        batch["position_ids"] = positions.expand(2, -1)
    compare(name, batch, seen)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_packed_documents_are_separate_runs(name: str) -> None:
    model, ids = model_of(name, "plait"), ids_of(1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    together = model(ids, position_ids=positions, use_cache=False).logits
    at = 0
    for length in LENGTHS:
        apart = model(ids[:, at : at + length], use_cache=False).logits
        assert (together[:, at : at + length] - apart).abs().max() < 1e-12
        at += length


def test_generation_with_a_cache() -> None:
    found, wanted = (model_of("llama", kind).eval() for kind in ("plait", "sdpa"))
    ids, mask = ids_of(), torch.ones(2, sum(LENGTHS), dtype=torch.long)
    mask[0, :3] = 0
    tokens = [
        m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for m in (found, wanted)
    ]
    assert torch.equal(*tokens)


def test_another_model_is_not_touched_and_it_can_be_taken_back() -> None:
    other = model_of("llama", "sdpa")
    model = model_of("llama", "plait")
    assert other.config._attn_implementation == "sdpa"
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids_of()).logits, other(ids_of()).logits)


def test_dropout_of_weights_goes_through_sdpa() -> None:
    model = model_of("llama", "plait")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    first = model(ids_of(), use_cache=False).logits
    assert not torch.equal(first, model(ids_of(), use_cache=False).logits)


def test_what_has_no_description_is_refused_by_name() -> None:
    def mine(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q >= k

    with pytest.raises(PlanError, match=r"mine"):
        meaning_of(mine)
    with pytest.raises(PlanError, match=r"no model of transformers"):
        plait.use_attention(torch.nn.Linear(2, 2))


def test_a_mask_that_is_ignored_is_noticed() -> None:
    def ignored(*args: Any) -> MaskSpec:
        return MaskSpec()

    from plait.hf.attention import registering

    with mutation.must_fail(registering, "_spec", ignored):
        test_it_is_eager_attention("llama", "packed")
