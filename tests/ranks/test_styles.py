"""Every style by itself, chains of them, and styles that users write."""

import copy
import inspect
import io
import logging
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import plait
from plait.comm import count
from plait.errors import PlanError
from plait.plan.intervals import even, length
from plait.state import state_of
from plait.styles import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    TensorParallelLayer,
    experts,
    layer,
    packed,
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
        split(x_of(2, 5, 12)).sum().backward()
    assert calls == {"all_reduce": 2}, "one forward, one for the gradient of the input"
    assert_same(split, whole, x_of(2, 5, 12))
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


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("width", [1, 2, 5, 10, 13])
def test_packed_parts_that_do_not_divide(width: int) -> None:
    whole = GateUp(width=width)
    split = split_copy(whole, {"gate_up": "packed_colwise", "down": "rowwise"})
    assert_same(split, whole, x_of(2, 5, 12))
    state = plait.full_state_dict(split)
    assert all(torch.equal(state[k], v) for k, v in whole.state_dict().items())
    step, rank = -(-width // world()), torch.distributed.get_rank()
    mine = max(0, min(width, (rank + 1) * step) - rank * step)
    assert split.gate_up.weight.to_local().shape[0] == 2 * mine
    assert split.down.weight.to_local().shape[1] == mine
    wrong = (AssertionError, RuntimeError)
    with mutation.must_fail(packed, "packed", lambda x, dim, n, _: even(x, dim, n), wrong):
        whole = GateUp(width=13)
        split = split_copy(whole, {"gate_up": "packed_colwise", "down": "rowwise"})
        assert_same(split, whole, x_of(2, 5, 12))


@pytest.mark.ranks(2)
def test_parts_that_a_packed_weight_does_not_have_are_refused_by_name() -> None:
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
        for tokens in (12, 13, 1):
            assert_same(split, whole, x_of(2, tokens, 12, seed=tokens))


@pytest.mark.ranks(2, 3)
def test_all_reduce_local_params_and_summed_gradients() -> None:
    class Sinks(nn.Module):
        """A bare parameter with one entry per feature, a norm inside the split region."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 24)
            self.sinks = nn.Parameter(torch.ones(24))
            self.scale = nn.LayerNorm(2)
            self.second = nn.Linear(24, 12)
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


@pytest.mark.ranks(2, 3)
def test_rules_that_name_parameters() -> None:
    whole = TwoLinears()
    split = split_copy(whole, {"first.weight": "colwise", "second.weight": "rowwise"})
    assert_same(split, whole, x_of(2, 5, 12))
    assert split.first.bias.placements == (Shard(0),), "the bias goes with its weight"
    with pytest.raises(PlanError, match="one forward"):
        split_copy(TwoLinears(), {"first.weight": "colwise", "first.bias": "replicate"})


class Gated(nn.Module):
    """A bare parameter between two split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.gate = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)) * self.gate) * scale


@pytest.mark.ranks(2, 3)
def test_a_bare_parameter_whose_gradient_is_a_sum() -> None:
    whole = Gated()
    del whole.wide
    plan = {"up": "colwise", "down": "rowwise", "gate": "replicated_with_grad_allreduce"}
    assert_same(split_copy(whole, plan), whole, x_of(2, 5, 12))
    split = split_copy(whole, plan)
    layer.border_of(split).grads.clear()
    with pytest.raises(AssertionError, match="gate"):  # the test notices a sum left out
        assert_same(split, whole, x_of(2, 5, 12))


@pytest.mark.ranks(2)
def test_a_cut_parameter_of_a_module_that_no_rule_adapts_is_refused_and_undone() -> None:
    whole = Gated().double()
    before = {name: id(param) for name, param in whole.named_parameters()}
    plan = {"up": "colwise", "down": "rowwise", "wide": "colwise"}
    with pytest.raises(PlanError, match=r"'wide' cuts a parameter of '' \(Gated\)"):
        plait.parallelize(whole, tp_plan=plan)
    assert before == {name: id(param) for name, param in whole.named_parameters()}
    assert all("forward" not in vars(part) for part in whole.modules())
    plait.parallelize(whole, tp_plan={"up": "colwise", "down": "rowwise"})


@pytest.mark.ranks(2)
def test_a_part_that_was_split_before_is_refused() -> None:
    whole = nn.Sequential(TwoLinears(), TwoLinears()).double()
    plait.parallelize(whole[0], tp_plan={"first": "colwise", "second": "rowwise"})
    with pytest.raises(plait.LayoutError, match="0 has been split already"):
        plait.parallelize(whole, tp_plan={"0.first": "colwise", "0.second": "rowwise"})


@pytest.mark.ranks(2, 3)
def test_token_ids_outside_the_table_are_an_error_on_all_ranks() -> None:
    split = split_copy(nn.Sequential(nn.Embedding(6, 4)), {"0": "embedding_rowwise"})
    for ids in ([[0, 6]], [[-1, 2]]):
        with pytest.raises(IndexError, match="out of range"):
            split(torch.tensor(ids))
    assert split(torch.tensor([[0, 5]])).shape == (1, 2, 4), "it works after the refusal"


@pytest.mark.ranks(2)
def test_arguments_by_name_in_any_order() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Scaled(12, 24), nn.Linear(24, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(scale=x.new_ones(1) * 2, x=x))

    whole = Both()
    assert_same(split_copy(whole, {"up": "colwise", "down": "rowwise"}), whole, x_of(2, 5, 12))


@pytest.mark.ranks(2)
def test_a_subclass_that_only_changes_gradient_modes_is_heard() -> None:
    class Summed(ColwiseParallel):
        def param_grads(self, module: nn.Module) -> Any:
            return {"weight": "sum"}

    ALL_PARALLEL_STYLES.register("colwise_summed", Summed())
    split = split_copy(nn.Sequential(nn.Linear(4, 4)), {"0": "colwise_summed"})
    with count() as calls:
        split(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert calls.backward == {"all_reduce": 1}


@pytest.mark.ranks(2)
def test_autocast_keeps_the_dtype_of_one_process() -> None:
    whole = TwoLinears().float()
    add_noise(whole)
    split = copy.deepcopy(whole)
    plait.parallelize(split, tp_plan={"first": "colwise", "second": "rowwise"})
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    for grads in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grads):
            assert split(x).dtype == whole(x).dtype == torch.bfloat16
            torch.testing.assert_close(split(x), whole(x), rtol=0.05, atol=0.05)


@pytest.mark.ranks(2)
def test_quantized_weights_and_pickling_are_refused_by_name() -> None:
    class Packed(nn.Linear):
        """The shape in which 4-bit weights are stored."""

        def __init__(self) -> None:
            super().__init__(8, 8, bias=False)
            packed = torch.zeros(32, 1, dtype=torch.uint8)
            self.weight = nn.Parameter(packed, requires_grad=False)

    with pytest.raises(PlanError, match="packed weights of this kind cannot be split"):
        plait.parallelize(nn.Sequential(Packed()), tp_plan={"0": "colwise"})
    split = split_copy(nn.Sequential(nn.Linear(4, 4)), {"0": "colwise"})
    with pytest.raises(plait.PlaitError, match="full_state_dict"):
        torch.save(split, io.BytesIO())


@pytest.mark.ranks(2)
def test_a_forward_keeps_its_signature() -> None:
    split = split_copy(Gated(), {"up": "colwise", "down": "rowwise", "wide": "replicate"})
    assert list(inspect.signature(split.forward).parameters) == ["x", "scale"]
    assert list(inspect.signature(split.up.forward).parameters) == ["input"]


@pytest.mark.ranks(2, 3)
def test_a_failure_on_one_rank_is_told_to_the_others() -> None:
    class Fragile(Gated):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            if torch.distributed.get_rank() == 1 and scale == 0:
                raise MemoryError("no room on this rank")
            return super().forward(x, scale)

    split = split_copy(Fragile(), {"up": "colwise", "down": "rowwise", "wide": "replicate"})
    x = torch.ones(2, 12, dtype=torch.float64)
    begin = time.perf_counter()
    with pytest.raises((MemoryError, plait.RankError), match="no room on this rank"):
        split(x, scale=0.0)
    assert time.perf_counter() - begin < 5
    assert split(x).shape == (2, 12), "the axis works again"


@pytest.mark.ranks(2, 3)
def test_packed_layouts_are_known_to_the_parameter() -> None:
    ALL_PARALLEL_STYLES.register("packed_qkv", PackedColwiseParallel(sections=(2, 1, 1)))
    whole = nn.Sequential(Qkv())
    split = split_copy(whole, {"0.qkv": "packed_qkv", "0.out": "rowwise"})
    part = plait.full_state_dict(split[0])
    assert all(torch.equal(part[k], v) for k, v in whole[0].state_dict().items())
    split(x_of(2, 5, 12)).sum().backward()
    whole(x_of(2, 5, 12)).sum().backward()
    torch.testing.assert_close(
        plait.full_grads(split[0])["qkv.weight"],
        whole[0].qkv.weight.grad,
    )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_split_by_width(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**tiny.SIZES, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "head_dim": 4, "output_router_logits": True}
    fields = AutoConfig.for_model(kind, **sizes)
    whole = add_noise(
        AutoModelForCausalLM.from_config(
            fields, dtype=torch.float64, experts_implementation="eager"
        ).eval()
    )
    split = plait.parallelize(copy.deepcopy(whole))
    found = parity.compare(split, whole, tiny.batch("llama", size=3))
    assert any("experts" in name for name in found.grads)
    assert any("gate.weight" in name for name in found.grads), "the router has a gradient"
    assert plait.held_fraction(split) < 1 / world() + 0.1
    with mutation.must_fail(experts, "copy_to", lambda x, mesh: x):
        parity.compare(split, whole, tiny.batch("llama", size=3))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_experts_of_a_width_that_does_not_divide(kind: str, how: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**tiny.SIZES, "num_hidden_layers": 1, "num_experts_per_tok": 2, "head_dim": 4}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "vocab_size": 97}
    sizes |= {"intermediate_size": 13, "moe_intermediate_size": 13}
    if how == "grouped_mm":  # its rows have to be of whole 16 bytes, on every rank
        sizes |= {"intermediate_size": 4 * 5, "moe_intermediate_size": 4 * 5}
    dtype = torch.float64 if how == "eager" else torch.float32  # grouped_mm has no float64
    fields = AutoConfig.for_model(kind, **sizes)
    made = AutoModelForCausalLM.from_config(fields, dtype=dtype, experts_implementation=how)
    whole = add_noise(made.eval())
    split = plait.parallelize(copy.deepcopy(whole), check=False)
    found = parity.compare(split, whole, tiny.batch("llama", size=3))
    assert any("experts" in name for name in found.grads)
    state = plait.full_state_dict(split)
    assert all(torch.equal(state[k], v) for k, v in whole.state_dict().items())
    if how == "grouped_mm":
        stacks = [p.to_local() for p in split.parameters() if p.ndim == 3]
        assert stacks and all(extent % 4 == 0 for x in stacks for extent in x.shape[1:])


@pytest.mark.ranks(2)
def test_styles_that_are_not_built_are_refused_by_name() -> None:
    for style in ("grouped_gemm", "ep_dispatch_experts", "ep_router"):
        with pytest.raises(PlanError, match="is not built yet"):
            split_copy(nn.Sequential(nn.Linear(4, 4)), {"0": style})
    with pytest.raises(PlanError, match="no qk_rope_head_dim in the config"):
        split_copy(nn.Sequential(nn.Linear(4, 4)), {"0": "mla_kv_a_proj"})


@pytest.mark.ranks(2)
def test_a_plan_that_splits_little_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("plait"), "warning", lambda text, *rest: lines.append(text % rest)
    )
    plait.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 64)), tp_plan={"0": "colwise"})
    first = torch.distributed.get_rank() == 0
    assert bool(lines) is first and all("100 %" in line for line in lines)
    plait.parallelize(nn.Sequential(nn.Linear(64, 64)), tp_plan={"0": "colwise"})
    assert len(lines) == int(first)
