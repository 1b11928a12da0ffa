"""Stock optimizers and clipping on a split model: one process's steps, no gradient gathered."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import plait
from plait.comm import count
from plait.errors import PlaitError
from plait.surgery import fused
from plait.testing import add_noise, mutation, parity, tiny

UNEVEN = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 97,
}
"""Heads, widths and a vocabulary that do not divide."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven heads": ("llama", UNEVEN),
    "tied": ("llama", {**UNEVEN, "tie_word_embeddings": True}),
    "biases": ("qwen2", {}),
    "fused weights": ("phi3", {"intermediate_size": 50}),
}


class Lion(optim.Optimizer):
    """An optimizer of the user's own, element by element."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["beta"])


Made = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    **{
        f"AdamW {form}": lambda p, form=form: optim.AdamW(p, 1e-2, weight_decay=0.1, **{form: True})  # type: ignore[misc]
        for form in ("foreach", "fused", "amsgrad")
    },
    "AdamW": lambda p: optim.AdamW(p, 1e-2),
    **{
        f"SGD {form}": lambda p, form=form: optim.SGD(  # type: ignore[misc]
            p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **{form: True}
        )
        for form in ("foreach", "fused", "maximize")
    },
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD fused, plain": lambda p: optim.SGD(p, 0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, 1e-2),
    "Adam fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2, foreach=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "Adamax": lambda p: optim.Adamax(p, 1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, 0.1),
    "ASGD": lambda p: optim.ASGD(p, 1e-2),
    "Lion": Lion,
}


def pair(case: str) -> tuple[Any, Any]:
    name, sizes = CASES[case]
    whole = add_noise(tiny.model(name, **sizes)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split)
    return split, whole


def backward(models: Any, name: str = "llama", seed: int = 0) -> None:
    for model in models:
        with parity.exact():
            model(**tiny.batch(name, size=1 + seed, length=5 + seed, seed=seed)).loss.backward()


def number(x: torch.Tensor) -> float:
    return float(x.full_tensor() if isinstance(x, DTensor) else x)


def same_on_all_ranks(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Whole parameters and their states are equal on the ranks in every bit."""
    mine = []
    for param in model.parameters():
        if isinstance(param, DTensor) and param.placements[0].is_replicate():
            states = [x for x in optimizer.state[param].values() if isinstance(x, DTensor)]
            mine.append([x.to_local().detach() for x in (param, *states)])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    assert len(mine) > 3
    for other in every:
        for a, b in zip(mine, other, strict=True):
            assert all(map(torch.equal, a, b))


def three_steps(case: str, make: Made, split: Any, whole: Any) -> None:
    """Three clipped steps of both; asserts that they end equal."""
    name = CASES[case][0]
    steps = make(split.parameters()), make(whole.parameters())
    for step in range(3):
        backward((split, whole), name, step)
        norms = [
            number(nn.utils.clip_grad_norm_(m.parameters(), 0.5, error_if_nonfinite=True))
            for m in (split, whole)
        ]
        assert abs(norms[0] - norms[1]) <= 1e-11 * norms[1] and norms[1] > 0.5
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    found, expected = plait.full_state_dict(split), whole.state_dict()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-9)
    same_on_all_ranks(split, steps[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps(optimizer: str) -> None:
    three_steps("uneven heads", OPTIMIZERS[optimizer], *pair("uneven heads"))


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD fused"])
@pytest.mark.parametrize("case", ["uneven heads", "tied", "fused weights"])
def test_three_steps_of_other_models(case: str, optimizer: str) -> None:
    if case == "uneven heads" or dist.get_world_size() == 3:
        three_steps(case, OPTIMIZERS[optimizer], *pair(case))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["tied", "biases", "fused weights"])
def test_three_steps_at_two_ranks(case: str) -> None:
    three_steps(case, OPTIMIZERS["AdamW foreach"], *pair(case))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_norms_without_gathering(norm_type: float, foreach: bool | None) -> None:
    models = pair("uneven heads")
    backward(models)
    grads = [[p.grad for p in model.parameters()] for model in models]
    totals = [number(nn.utils.get_total_norm(g, norm_type, foreach=foreach)) for g in grads]
    assert abs(totals[0] - totals[1]) <= 1e-11 * totals[1]
    with count() as calls:
        nn.utils.clip_grad_norm_(models[0].parameters(), totals[1] / 2, norm_type, foreach=foreach)
    nn.utils.clip_grad_norm_(models[1].parameters(), totals[1] / 2, norm_type, foreach=foreach)
    num_params = len(grads[0])
    assert sum(calls.bytes.values()) <= 8 * num_params, f"a gradient travelled: {calls}"
    full = plait.full_grads(models[0])
    for name, param in models[1].named_parameters():
        torch.testing.assert_close(full[name], param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_values_and_gradients_that_are_not_finite(foreach: bool | None) -> None:
    models = pair("uneven heads")
    backward(models)
    with count() as calls:
        nn.utils.clip_grad_value_(models[0].parameters(), 1e-3, foreach=foreach)
    nn.utils.clip_grad_value_(models[1].parameters(), 1e-3, foreach=foreach)
    assert calls == {}
    full = plait.full_grads(models[0])
    assert max(g.abs().max().item() for g in full.values()) == 1e-3
    for name, param in models[1].named_parameters():
        torch.testing.assert_close(full[name], param.grad, rtol=1e-9, atol=1e-12)
    if dist.get_rank() == 0:  # one rank's slice alone
        q = models[0].model.layers[0].self_attn.q_proj.weight
        q.grad._local_tensor[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(models[0].parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.ranks(2)
def test_a_step_communicates_nothing() -> None:
    split, _ = pair("uneven heads")
    for name in ("AdamW fused", "AdamW", "SGD fused"):
        optimizer = OPTIMIZERS[name](split.parameters())
        backward([split])
        with count() as calls:
            optimizer.step()
        assert calls == {}, name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["SGD fused", "AdamW foreach"])
def test_with_torch_s_fully_shard_around_it(optimizer: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = add_noise(tiny.model("llama", **UNEVEN)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split, device_mesh=mesh["tp"])
    for layer in split.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(split, mesh=mesh["dp_shard"])
    steps = [OPTIMIZERS[optimizer](m.parameters()) for m in (split, whole)]
    data = mesh.get_local_rank("dp_shard")
    for step in range(3):
        with parity.exact():
            split(**tiny.batch("llama", seed=10 * step + data)).loss.backward()
            losses = [whole(**tiny.batch("llama", seed=10 * step + n)).loss for n in range(2)]
            (sum(losses) / 2).backward()
        norms = [number(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (split, whole)]
        assert abs(norms[0] - norms[1]) <= 1e-10 * norms[1]
        for one in steps:
            one.step()
            one.zero_grad()
    with torch.no_grad(), parity.exact():
        batch = tiny.batch("llama", seed=99)
        found, expected = split(**batch).loss, whole(**batch).loss
    assert abs(float(found) - float(expected)) < 1e-10


@pytest.mark.ranks(2)
def test_a_gradient_that_lies_otherwise_is_refused() -> None:
    split, _ = pair("biases")
    backward([split], "qwen2")
    q = split.model.layers[0].self_attn.q_proj.weight
    q.grad = None
    q.__dict__.pop("grad", None)
    other = DTensor.from_local(torch.zeros(q.shape, dtype=q.dtype), q.device_mesh, run_check=False)
    with pytest.raises(PlaitError, match="its gradient or state as"):
        torch._fused_sgd_(
            [q.detach()], [other], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip


@pytest.mark.ranks(2)
def test_the_tests_notice() -> None:
    split, whole = pair("uneven heads")

    def twice(x: Any) -> Any:
        found = local(x)
        return [part * 2 for part in found] if isinstance(found, list) else found

    local = fused._local
    with mutation.must_fail(fused, "_local", twice):
        three_steps("uneven heads", OPTIMIZERS["SGD fused"], split, whole)
