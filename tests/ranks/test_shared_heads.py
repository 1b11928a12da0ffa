"""Key/value heads that several ranks share: stored once, gathered when used, trained as one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

import plait
from plait import comm
from plait.comm import count
from plait.styles import heads
from plait.styles.heads import cut_of
from plait.testing import add_noise, mutation, parity, run_ranks, tiny

SIZES: dict[str, Any] = {
    "hidden_size": 18,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 96,
    "num_hidden_layers": 2,
}


def pair(name: str = "qwen2", dtype: torch.dtype = torch.float64, **sizes: Any) -> tuple[Any, Any]:
    """A model whose key/value heads are shared at 2 and 4 ranks, split and whole."""
    whole = add_noise(tiny.model(name, dtype=dtype, **{**SIZES, **sizes}))
    split = plait.parallelize(copy.deepcopy(whole), check=False)
    return split, whole


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(0.5),
    "copy_": lambda x: x.copy_(x + 0.5),
    "data": lambda x: x.data.add_(0.5),
    "foreach": lambda x: torch._foreach_add_([x], 0.5),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_of_the_weight_is_seen_by_the_next_call(how: str, frozen: bool) -> None:
    split, whole = pair()
    batch = tiny.batch("llama")
    for model in (split, whole):
        model.requires_grad_(not frozen)
    with torch.no_grad():
        parity.compare(split, whole, batch, grads=False)
        for model in (split, whole):
            for name, param in model.named_parameters():
                if "k_proj" in name or "v_proj" in name:
                    CHANGES[how](param)
        parity.compare(split, whole, batch, grads=False)


@pytest.mark.ranks(2)
def test_generate_gathers_shared_heads_once_a_call() -> None:
    split, whole = pair()
    ids = tiny.batch("llama", size=1)["input_ids"]
    found = []
    for num_tokens in (2, 8):
        with count() as calls:
            tokens = split.generate(ids, max_new_tokens=num_tokens, do_sample=False)
        found.append(calls.get("all_gather", 0))
        assert torch.equal(tokens, whole.generate(ids, max_new_tokens=num_tokens, do_sample=False))
    # Weight and bias of k and of v in both layers, and for each token the head's logits.
    assert found == [2 * 2 * 2 + 2, 2 * 2 * 2 + 8], found
    with torch.no_grad():
        for model in (split, whole):
            torch._foreach_mul_(list(model.parameters()), 1.5)
    assert torch.equal(
        split.generate(ids, max_new_tokens=8, do_sample=False),
        whole.generate(ids, max_new_tokens=8, do_sample=False),
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9, foreach=True),
}


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One training step with a clipped gradient; returns its norm before."""
    optimizer.zero_grad()
    with parity.exact():
        model(**tiny.batch("llama", size=3, seed=seed, padded=True)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def shared_rows_are_alike(split: Any) -> None:
    """What every rank works on of a key or value is what the ranks store, to the last bit."""
    state = plait.full_state_dict(split)
    rank = torch.distributed.get_rank()
    found = 0
    for name, module in split.named_modules():
        cut = cut_of(module)
        if cut is None or not cut.cut.is_shared:
            continue
        found += 1
        for param, dim in cut.dims.items():
            with torch.no_grad():
                mine = cut.needed(module._parameters[param].to_local(), dim)
            rows = [i for a, b in cut.cut.need[rank] for i in range(a, b)]
            expected = state[f"{name}.{param}"].index_select(dim, torch.tensor(rows))
            assert torch.equal(mine, expected), name
    assert found


def same_weights(split: Any, whole: Any, tolerance: float = 1e-9) -> None:
    state = plait.full_state_dict(split)
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_training_steps_are_those_of_one_process(how: str) -> None:
    split, whole = pair()
    pairs = [(model, OPTIMIZERS[how](model.parameters())) for model in (split, whole)]
    for seed in range(3):
        ours, theirs = (step(*one, seed) for one in pairs)
        assert ours == pytest.approx(theirs, rel=1e-11)
        with torch.no_grad():  # between steps, as an evaluation does
            parity.compare(split, whole, tiny.batch("llama"), grads=False, tolerance=1e-8)
    same_weights(split, whole)
    shared_rows_are_alike(split)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("name", ["qwen2", "phi3", "olmo2"])
def test_the_norm_of_all_gradients_counts_shared_heads_once(name: str, norm_type: float) -> None:
    split, whole = pair(name)
    norms = []
    for model in (split, whole):
        with parity.exact():
            model(**tiny.batch("llama")).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-11) and norms[1] > 0.1
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(grads[key], param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_these_tests_notice() -> None:
    def trained() -> None:
        split, whole = pair()
        ours, theirs = (
            step(model, OPTIMIZERS["adamw foreach"](model.parameters()), 0)
            for model in (split, whole)
        )
        assert ours == pytest.approx(theirs, rel=1e-11)
        with torch.no_grad():
            parity.compare(split, whole, tiny.batch("llama"), grads=False, tolerance=1e-8)
        same_weights(split, whole)

    trained()
    with mutation.must_fail(heads, "gather_copy", comm.gather_from):  # no sum of the gradients
        trained()
    kept: dict[Any, torch.Tensor] = {}

    def recall(owner: Any, key: str, source: Any) -> Any:
        return kept.get((id(owner), key))

    def keep(owner: Any, key: str, source: Any, x: torch.Tensor) -> None:
        kept[(id(owner), key)] = x

    def evaluated() -> None:
        split, whole = pair()
        with torch.no_grad():
            split(**tiny.batch("llama"))
        for model in (split, whole):
            step(model, OPTIMIZERS["adamw foreach"](model.parameters()), 0)
        with torch.no_grad():
            parity.compare(split, whole, tiny.batch("llama"), grads=False, tolerance=1e-8)

    evaluated()
    with mutation.patched(heads, "keep", keep), mutation.must_fail(heads, "kept", recall):
        evaluated()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_a_saved_model_is_read_by_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    split, whole = pair(name, torch.float32)
    split.save_pretrained(tmp_path)
    torch.distributed.barrier()
    expected = whole.state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(plain.state_dict()[n], x) for n, x in expected.items())
    again = plait.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        distributed_config=plait.DistributedConfig(
            tp_size=torch.distributed.get_world_size(), check_plan=False
        ),
    )
    state = plait.full_state_dict(again)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[n], x) for n, x in expected.items())
    owned = sum(param.to_local().nbytes for param in again.parameters())
    assert again._plait_report.bytes_read == owned, "only what this rank stores"
    total = torch.tensor(sum(p.to_local().numel() for p in again.parameters() if _is_cut(p)))
    torch.distributed.all_reduce(total)
    assert total == sum(p.numel() for p in again.parameters() if _is_cut(p)), "stored once"


def _is_cut(param: Any) -> bool:
    return not param.placements[0].is_replicate()


def _saved_on_two_ranks(path: str) -> None:
    split, _ = pair("qwen2", torch.float32)
    split.save_pretrained(path)


def _read(path: str) -> None:
    world = torch.distributed.get_world_size()
    _, whole = pair("qwen2", torch.float32)
    config = plait.DistributedConfig(tp_size=world, check_plan=False)
    again = plait.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    state = plait.full_state_dict(again)
    assert all(torch.equal(state[n], x) for n, x in whole.state_dict().items())


@pytest.mark.slow
def test_saved_on_two_ranks_and_read_on_three_and_four(tmp_path: Path) -> None:
    run_ranks(_saved_on_two_ranks, 2, str(tmp_path))
    for num_ranks in (3, 4):
        run_ranks(_read, num_ranks, str(tmp_path))
