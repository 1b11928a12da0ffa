"""Copies × shards × tensor parallel: training is that of one process on all the samples."""

import copy
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait.build import compose
from plait.proof.numbers import exact
from plait.state import state_of
from plait.surgery import data_ranks
from plait.testing import add_noise, mutation, tiny

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": True,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2": {"vocab_size": 97},
    "phi3": {},
    "gemma3_text": {},
    "mlp": {},
}
"""Tied with heads and widths that do not divide; biases and an odd vocabulary; fused weights; tied
with a softcap's relatives; no model of transformers."""

LAYOUTS = {
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    3: [(1, 1, 3), (1, 3, 1)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)],
}
"""World size → (copies, shards, tensor parallel)."""

MAX_NORM = 0.5
STEPS = 3


def config_of(layout: tuple[int, int, int], **more: Any) -> plait.DistributedConfig:
    copies, shards, tp = layout
    return plait.DistributedConfig(
        dp_replicate_size=copies, dp_shard_size=shards, tp_size=tp, **more
    )


def pair(
    name: str, config: plait.DistributedConfig, dtype: torch.dtype = torch.float64, **over: Any
) -> tuple[Any, Any]:
    whole = add_noise(tiny.model(name, dtype=dtype, **MODELS.get(name, {}) | over)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split, config, tp_plan=tiny.MLP_PLAN if name == "mlp" else None)
    return split, whole


def batches(name: str, number: int, step: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """One batch for each data rank: of another size, length and share of masked tokens."""
    found = []
    for rank in range(number):
        seed = 10 * step + rank
        if name == "mlp":  # the loss is the test's own, a mean over equal numbers of rows
            found.append({"x": tiny.batch(name, size=3, length=5, seed=seed)["x"]})
            continue
        batch = tiny.batch(name, size=1 + rank, length=6 + 2 * rank, seed=seed)
        batch["input_ids"] = batch["input_ids"] % vocab_size
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, : 1 + (seed % 4)] = -100
        batch.pop("attention_mask", None)
        found.append(batch)
    return found


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    return output.loss if hasattr(output, "loss") else output.pow(2).mean()


def loss_of_all(model: Any, all_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The mean over the tokens of all batches, each once, in one process."""
    weights = [
        int((batch["labels"][:, 1:] != -100).sum()) if "labels" in batch else 1
        for batch in all_batches
    ]
    losses = [loss_of(model, batch) * n for batch, n in zip(all_batches, weights, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def number(x: torch.Tensor) -> float:
    return float(x.full_tensor() if hasattr(x, "full_tensor") else x)


def train(
    name: str, split: Any, whole: Any, make_optimizer: Any, steps: int = STEPS
) -> list[tuple[float, float]]:
    """Trains both; returns the differences of loss and norm at each step."""
    state = state_of(split)
    data = state.data_mesh
    rank = 0 if data is None else data.get_local_rank()
    optimizers = make_optimizer(split.parameters()), make_optimizer(whole.parameters())
    vocab_size = getattr(getattr(whole, "config", None), "vocab_size", 1)
    found = []
    for step in range(steps):
        all_batches = batches(name, state.num_data_ranks, step, vocab_size)
        with exact():
            loss = loss_of(split, all_batches[rank])
            loss.backward()
            expected = loss_of_all(whole, all_batches)
            expected.backward()
        if name == "mlp" and data is not None:  # the user's own loss: its mean is the user's too
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=data.get_group())
            loss /= data.size()
        norms = [
            number(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            for model in (split, whole)
        ]
        found.append((abs(float(loss) - float(expected)), abs(norms[0] - norms[1])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def largest_difference(split: Any, whole: Any) -> float:
    state = plait.full_state_dict(split)
    return max(float((state[k] - v).abs().max()) for k, v in whole.state_dict().items())


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def layouts(world_size: int) -> list[tuple[int, int, int]]:
    return LAYOUTS[world_size]


def _cases(world_size: int) -> Any:
    return pytest.mark.parametrize(
        "layout", LAYOUTS[world_size], ids=lambda layout: "x".join(map(str, layout))
    )


def check(name: str, layout: tuple[int, int, int]) -> None:
    split, whole = pair(name, config_of(layout))
    found = train(name, split, whole, sgd)
    assert max(loss for loss, _ in found) < 1e-10, found
    assert max(norm for _, norm in found) < 1e-10, found
    assert largest_difference(split, whole) < 1e-10
    digest = hashlib.sha256()
    for tensor in plait.full_state_dict(split).values():
        digest.update(tensor.numpy().tobytes())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest.hexdigest())
    assert len(set(told)) == 1, "ranks hold different weights where they hold the same ones"
    held = plait.held_fraction(split)
    _, shards, tp = layout
    assert held < 1 / (shards * tp) + 0.12, held


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
@_cases(2)
def test_two_ranks(name: str, layout: tuple[int, int, int]) -> None:
    check(name, layout)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", MODELS)
@_cases(3)
def test_three_ranks(name: str, layout: tuple[int, int, int]) -> None:
    check(name, layout)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MODELS)
@_cases(4)
def test_four_ranks(name: str, layout: tuple[int, int, int]) -> None:
    check(name, layout)


ADAM = {"default": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ADAM)
def test_adamw_in_every_form(form: str) -> None:
    split, whole = pair("llama", config_of((1, 2, 2)))

    def make(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=1e-3, eps=1e-3, **ADAM[form])

    found = train("llama", split, whole, make)
    assert max(max(pair) for pair in found) < 1e-10, found
    assert largest_difference(split, whole) < 1e-10


@pytest.mark.ranks(4)
def test_bfloat16_and_mixed_precision() -> None:
    split, whole = pair("qwen2", config_of((1, 2, 2)), dtype=torch.bfloat16)
    found = train("qwen2", split, whole, sgd, steps=1)
    assert found[0][0] < 0.05 * 5, found
    mixed, whole = pair(
        "qwen2", config_of((1, 2, 2), fsdp_mixed_precision=True), dtype=torch.float32
    )
    batch = batches("qwen2", 2, 0, 97)[state_of(mixed).data_mesh.get_local_rank()]
    seen = []
    mixed.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, output: seen.append((output.dtype, module.weight.dtype))
    )
    mixed(**batch).loss.backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in mixed.parameters() if p.grad is not None} == {torch.float32}
    expected = loss_of_all(whole, batches("qwen2", 2, 0, 97))
    expected.backward()
    grads = plait.full_grads(mixed)
    for key, param in whole.named_parameters():
        difference = (grads[key] - param.grad).norm() / param.grad.norm()
        assert difference < 0.05, (key, difference)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 2, 1)])
def test_offload_to_the_host_changes_nothing(layout: tuple[int, int, int]) -> None:
    split, whole = pair("phi3", config_of(layout, fsdp_cpu_offload=True))
    found = train("phi3", split, whole, sgd)
    assert max(max(pair) for pair in found) < 1e-10, found
    assert largest_difference(split, whole) < 1e-10


@pytest.mark.ranks(4)
def test_a_second_model_in_the_same_process() -> None:
    config = config_of((1, 2, 2))
    first, first_whole = pair("llama", config)
    second, second_whole = pair("phi3", config)
    for name, split, whole in (("llama", first, first_whole), ("phi3", second, second_whole)):
        assert max(max(p) for p in train(name, split, whole, sgd, steps=2)) < 1e-10
    assert largest_difference(first, first_whole) < 1e-10
    assert largest_difference(second, second_whole) < 1e-10


@pytest.mark.ranks(4)
def test_accumulated_gradients() -> None:
    """Two backwards, then one step; without a reduction in the first the sum is the same."""
    for sync in (True, False):
        split, whole = pair("qwen2", config_of((1, 2, 2)))
        rank = state_of(split).data_mesh.get_local_rank()
        for step in range(2):
            all_batches = batches("qwen2", 2, step, 97)
            split.set_requires_gradient_sync(sync or step == 1)
            with exact():
                loss_of(split, all_batches[rank]).backward()
                loss_of_all(whole, all_batches).backward()
        grads = plait.full_grads(split)
        for key, param in whole.named_parameters():
            assert (grads[key] - param.grad).abs().max() < 1e-10, key


class Scaled(torch.nn.Module):
    """Layers with a scalar parameter each, which FSDP cannot cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ScaledLayer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ScaledLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class InnerScaled(Scaled):
    """The scalars multiply what is split: each rank's gradient of one is a term."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(InnerScaledLayer() for _ in range(2))


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


class InnerScaledLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.scale(torch.tanh(self.up(x))))


def scaled(layout: tuple[int, int, int], kind: type = Scaled) -> tuple[Any, Any, float]:
    torch.manual_seed(0)
    whole = kind().double()
    split = copy.deepcopy(whole)
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    if kind is InnerScaled:
        plan["layers.*.scale"] = "replicated_with_grad_allreduce"
    plait.parallelize(split, config_of(layout), tp_plan=plan)
    data = state_of(split).data_mesh
    x = torch.randn(data.size(), 3, 6, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=0.1) for m in (split, whole)]
    norms = 0.0
    for _ in range(2):
        split(x[data.get_local_rank()]).pow(2).mean().backward()
        whole(x).pow(2).mean().backward()
        found = [
            number(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)) for m in (split, whole)
        ]
        norms = max(norms, abs(found[0] - found[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return split, whole, norms


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", [Scaled, InnerScaled])
def test_scalars_that_cannot_be_cut(kind: type) -> None:
    layout = (1, 2, dist.get_world_size() // 2)
    split, whole, norms = scaled(layout, kind)
    assert norms < 1e-12
    assert largest_difference(split, whole) < 1e-12


@pytest.mark.ranks(2)
def test_scalars_come_in_the_same_order_on_all_ranks() -> None:
    """They travel as one tensor; an order by address would mix them up."""
    junk = [torch.nn.Parameter(torch.zeros(())) for _ in range(dist.get_rank() * 7)]
    model = torch.nn.Sequential(*(ScaledLayer() for _ in range(12)))
    kept: list[Any] = []
    with mutation.patched(data_ranks.Averaging, "keep", lambda self, found: kept.extend(found)):
        plait.parallelize(model, config_of((1, 2, 1)), tp_plan={})
    del junk
    scalars = [param for param in model.parameters() if not param.ndim]
    assert len(kept) == 12 and all(a is b for a, b in zip(kept, scalars, strict=True))


@pytest.mark.ranks(2)
def test_mutation_a_scalar_that_is_not_reduced() -> None:
    with mutation.patched(data_ranks.Averaging, "_note", lambda self, param: None):
        split, whole, _ = scaled((1, 2, 1))
    assert largest_difference(split, whole) > 1e-6


@pytest.mark.ranks(2)
def test_mutation_an_unsharded_model_is_no_copy_of_the_other() -> None:
    """Without FSDP each data rank trains by itself."""
    with mutation.must_fail(compose, "shard", lambda *unused: None):
        check("qwen2", (1, 2, 1))


@pytest.mark.ranks(2)
def test_groups_by_a_plan_of_ones_own_and_by_the_shipped_one() -> None:
    for plan in (
        {"layers.*": "keep_full_weight", "layers.*.mlp": "free_full_weight"},
        {"layers.*": "root"},
        "model",
    ):
        split, whole = pair("qwen2", config_of((1, 2, 1), fsdp_plan=plan))
        assert max(max(p) for p in train("qwen2", split, whole, sgd, steps=1)) < 1e-10
        assert largest_difference(split, whole) < 1e-10
    with pytest.raises(plait.PlanError, match=r"layers\.\*\.mpl.*closest names: .*mlp"):
        pair("qwen2", config_of((1, 2, 1), fsdp_plan={"layers.*.mpl": "free_full_weight"}))
    with pytest.raises(plait.PlanError, match="unknown style 'free_weight'"):
        pair("qwen2", config_of((1, 2, 1), fsdp_plan={"layers.*": "free_weight"}))
