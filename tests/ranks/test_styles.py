"""Every style by itself, chains of them, and styles that users write."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import plait
from plait.comm import count
from plait.errors import PlanError
from plait.plan.intervals import length
from plait.state import state_of
from plait.styles import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    TensorParallelLayer,
)
from plait.testing import add_noise, mutation, parity, tiny


def world() -> int:
    return torch.distributed.get_world_size()


def split_copy(module: nn.Module, plan: dict[str, str]) -> nn.Module:
    """A split copy of `module`, which gets noise first."""
    add_noise(module.double())
    return plait.parallelize(copy.deepcopy(module), tp_plan=plan)


def x_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def assert_same(
    split: nn.Module, whole: nn.Module, x: torch.Tensor, key: str = "x"
) -> parity.Comparison:
    """Outputs, gradients of parameters, and the gradient of the input."""
    found = parity.compare(split, whole, {key: x})
    x_split, x_whole = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    weights = torch.randn(whole(x).shape, dtype=torch.float64, generator=torch.manual_seed(3))
    (split(x_split) * weights).sum().backward()
    (whole(x_whole) * weights).sum().backward()
    assert x_split.grad is not None and x_whole.grad is not None
    torch.testing.assert_close(x_split.grad, x_whole.grad, rtol=1e-11, atol=1e-12)
    return found


class TwoLinears(nn.Module):
    def __init__(self, hidden: int = 12, width: int = 24, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, width, bias=bias)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class GateUp(nn.Module):
    """A fused gate and up projection, as Phi-3 has it."""

    def __init__(self, hidden: int = 12, width: int = 24) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * up)


class Pairwise(nn.Module):
    """A layer whose input features are two packed parts."""

    def __init__(self, hidden: int = 12, width: int = 24) -> None:
        super().__init__()
        self.pair = nn.Linear(hidden, 2 * width)
        self.down = nn.Linear(2 * width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.pair(x)))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "plan",
    [
        {"first": "colwise", "second": "rowwise"},
        {"first": "colwise_gather_output"},
        {"first": "colwise_rep", "second": "rowwise_rep"},
        {"second": "rowwise_split_input"},
        {"first": "colwise_gather_output", "second": "rowwise_split_input"},
        {"first": "replicate", "second": "replicate"},
        {"first.weight": "replicate"},
    ],
    ids=lambda plan: "-".join(plan.values()),
)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_styles(plan: dict[str, str], bias: bool) -> None:
    whole = TwoLinears(bias=bias)
    split = split_copy(whole, plan)
    assert_same(split, whole, x_of(2, 5, 12))
    assert_same(split, whole, x_of(3, 12, seed=1))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("width", [1, 2, 7, 10, 13])
def test_widths_that_do_not_divide(width: int) -> None:
    whole = TwoLinears(width=width)
    split = split_copy(whole, {"first": "colwise", "second": "rowwise"})
    assert_same(split, whole, x_of(2, 5, 12))
    gathered = split_copy(whole, {"first": "colwise_gather_output", "second": "rowwise_rep"})
    assert_same(gathered, whole, x_of(2, 5, 12))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("padding_idx", [None, 0, 7, -1])
@pytest.mark.parametrize("size", [12, 13, 2])
def test_embeddings(style: str, padding_idx: int | None, size: int) -> None:
    padding_idx = padding_idx if padding_idx is None or padding_idx < size else None
    whole = nn.Embedding(size, 10, padding_idx=padding_idx)
    split = split_copy(nn.Sequential(whole), {"0": style})
    add_noise(whole.double(), seed=9)
    whole.load_state_dict({"weight": plait.full_state_dict(split)["0.weight"]})
    ids = torch.arange(2 * size).reshape(2, size) % size
    reference = nn.Sequential(whole)
    parity.compare(split, reference, {"input": ids})
    parity.compare(split, reference, {"input": ids[:, :1]})


@pytest.mark.ranks(2, 3)
def test_packed_layers() -> None:
    whole = GateUp()
    split = split_copy(whole, {"gate_up": "packed_colwise", "down": "rowwise"})
    with count() as calls:
        assert_same(split, whole, x_of(2, 5, 12))
    assert set(calls) == {"all_reduce"} or "all_gather" in calls  # full_grads gathers
    assert torch.equal(split.gate_up.weight.full_tensor(), whole.gate_up.weight)
    pairwise = Pairwise()
    both = split_copy(pairwise, {"pair": "packed_colwise", "down": "packed_rowwise"})
    assert_same(both, pairwise, x_of(2, 5, 12))
    assert both.down.bias.placements == (Replicate(),)


class Qkv(nn.Module):
    """A fused qkv of unequal parts: 12 query heads, 6 key and 6 value heads of width 2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 48)
        self.out = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.qkv(x)
        unit = total.shape[-1] // 4
        q, k, v = total.split([2 * unit, unit, unit], dim=-1)
        k, v = (t.unflatten(-1, (-1, 2)).repeat_interleave(2, dim=-2).flatten(-2) for t in (k, v))
        return self.out(torch.tanh(q) * k + v)


@pytest.mark.ranks(2, 3)
def test_packed_layers_of_unequal_parts() -> None:
    ALL_PARALLEL_STYLES.register("packed_qkv", PackedColwiseParallel(sections=(2, 1, 1)))
    whole = Qkv()
    split = split_copy(whole, {"qkv": "packed_qkv", "out": "rowwise"})
    assert_same(split, whole, x_of(2, 5, 12))
    state = plait.full_state_dict(split)
    assert all(torch.equal(state[k], v) for k, v in whole.state_dict().items())
    layouts = state_of(split).layouts  # type: ignore[union-attr]
    rank = torch.distributed.get_rank()
    assert length(layouts["qkv.weight"].pieces[rank]) == 48 // world()
    assert len(layouts["qkv.bias"].pieces[rank]) == 3


@pytest.mark.ranks(4)
def test_packed_parts_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"gate_up.weight.*\(10, 10\).*tp_size 4"):
        split_copy(GateUp(width=10), {"gate_up": "packed_colwise", "down": "rowwise"})
    ALL_PARALLEL_STYLES.register("packed_odd", PackedColwiseParallel(sections=(5, 1)))
    with pytest.raises(PlanError, match=r"does not consist of parts in the ratio \(5, 1\)"):
        split_copy(GateUp(width=10), {"gate_up": "packed_odd", "down": "rowwise"})


@pytest.mark.ranks(2, 3, 4)
def test_sequence_parallel_between_a_rowwise_and_a_colwise_layer() -> None:
    """Rowwise → reduce-scatter over the sequence → norm on the local tokens → gather → colwise."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
            self.norm = nn.LayerNorm(12)
            self.up2, self.down2 = nn.Linear(12, 24), nn.Linear(24, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.down(torch.tanh(self.up(x))))
            return self.down2(torch.tanh(self.up2(x)))

    for local in (True, False):
        scatter = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
        ALL_PARALLEL_STYLES.register("rowwise_scatter", scatter)
        ALL_PARALLEL_STYLES.register("norm_local", SequenceParallel(use_local_output=local))
        ALL_PARALLEL_STYLES.register("colwise_gather", ColwiseParallel(input_layouts=Shard(1)))
        whole = Chain()
        split = split_copy(
            whole,
            {
                "up": "colwise",
                "down": "rowwise_scatter",
                "norm": "norm_local" if not local else "sequence_parallel",
                "up2": "colwise_gather",
                "down2": "rowwise",
            },
        )
        assert_same(split, whole, x_of(2, 12, 12))
        if local:
            assert_same(split, whole, x_of(2, 13, 12, seed=1))


@pytest.mark.ranks(2, 3)
def test_all_reduce_local_params_and_summed_gradients() -> None:
    class Sinks(nn.Module):
        """A bare parameter with one entry per feature, a norm inside the split region."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 24)
            self.sinks = nn.Parameter(torch.ones(24))
            self.scale = nn.LayerNorm(2)
            self.second = nn.Linear(24, 12, bias=False)
            self.total = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x)) * self.sinks
            x = self.scale(x.unflatten(-1, (-1, 2))).flatten(-2)
            return self.total(self.second(x))

    ALL_PARALLEL_STYLES.register("rowwise_partial", RowwiseParallel(output_layouts=Partial()))
    whole = nn.Sequential(Sinks())
    split = split_copy(
        whole,
        {
            "0": "local_params",
            "0.first": "colwise",
            "0.sinks": "colwise",
            "0.scale": "replicated_with_grad_allreduce",
            "0.second": "rowwise_partial",
            "0.total": "all_reduce",
        },
    )
    assert_same(split, whole, x_of(2, 5, 12), key="input")
    with mutation.must_fail(
        plait.styles.ReplicatedWithGradAllReduce, "param_grads", lambda self, module: {}
    ):
        parity.compare(split, whole, {"input": x_of(2, 5, 12)})


class TextbookColwise(TensorParallelLayer):
    """The column-parallel layer as DTensor's own documentation would write it."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        tensor = module._parameters[param]
        if tensor is None:
            return
        placed = distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(placed, requires_grad=tensor.requires_grad)

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Any, kwargs: Any, mesh: Any
    ) -> Any:
        x = args[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *args[1:]), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Any, mesh: Any) -> Any:
        return output.redistribute(placements=[Shard(-1)]).to_local()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["llama", "qwen2", "starcoder2"])
def test_a_textbook_custom_style_for_every_projection(name: str) -> None:
    ALL_PARALLEL_STYLES.register("colwise_custom", TextbookColwise())
    whole = add_noise(tiny.model(name))
    split = copy.deepcopy(whole)
    rules = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc"}
    plan = {
        pattern: "colwise_custom" for pattern in whole.tp_plan if pattern.split(".")[-1] in rules
    }
    plait.parallelize(split, tp_plan=plan)
    assert "colwise_custom" in str(split.tp_plan)
    found = parity.compare(split, whole, tiny.batch(name))
    assert len(found.grads) == len(list(whole.parameters()))
    assert plait.held_fraction(split) < 1 / world() + 0.1
    with torch.no_grad():
        parity.compare(split, whole, tiny.batch(name), grads=False)


@pytest.mark.ranks(2)
def test_a_style_that_only_changes_inputs_sees_plain_parameters() -> None:
    class Doubled(TensorParallelLayer):
        def transform_inputs_pre_forward(
            self, module: nn.Module, args: Any, kwargs: Any, mesh: Any
        ) -> Any:
            return (args[0] * 2, *args[1:]), kwargs

    ALL_PARALLEL_STYLES.register("doubled", Doubled())
    whole = nn.Sequential(nn.Linear(4, 4))
    split = split_copy(whole, {"0": "doubled"})
    x = x_of(3, 4)
    torch.testing.assert_close(split(x), whole(2 * x))


def test_the_registry_lists_closest_names_and_refuses_classes() -> None:
    with pytest.raises(KeyError, match="colwise"):
        ALL_PARALLEL_STYLES["colwse"]
    with pytest.raises(PlanError, match="with the brackets"):
        # The function itself: the test run's check of annotations would refuse the class first.
        inspect.unwrap(type(ALL_PARALLEL_STYLES).register)(
            ALL_PARALLEL_STYLES, "mine", ColwiseParallel
        )
    assert {"colwise", "rowwise", "packed_colwise", "local_params"} <= set(ALL_PARALLEL_STYLES)
