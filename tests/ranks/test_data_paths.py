"""Models whose data ranks do different things: experts, layers left out, statistics of a batch."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.build import unused, visits
from plait.errors import LayoutError, RankError
from plait.styles import batch_norm
from plait.testing import mutation
from plait.train import Window

DATA = [{"dp_shard_size": 2}, {"dp_replicate_size": 2}]
SHARDED = plait.DistributedConfig(dp_shard_size=2)


def split(whole: nn.Module, sizes: dict[str, Any], **more: Any) -> Any:
    copied = copy.deepcopy(whole)
    plan = {"tp_plan": {}} if sizes.get("tp_size", 1) > 1 else {}
    return plait.parallelize(copied, plait.DistributedConfig(**sizes, **more), **plan)


def compare(found: nn.Module, whole: nn.Module) -> None:
    """Every gradient is that of the mean of the ranks' losses; what no rank uses has none."""
    grads = plait.full_grads(found)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grads[name] - grad).abs().max() < 1e-12, name


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 13), nn.Linear(13, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Routed(nn.Module):
    """Its router sends all of a rank's tokens to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 9), nn.Linear(9, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.out(self.experts[which](self.into(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Routed()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.inner(x, which)


class Layered(nn.Module):
    """Experts inside of layers, as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return x


def routed(sizes: dict[str, Any], kind: type[nn.Module], **more: Any) -> None:
    torch.manual_seed(0)
    whole = kind().double()
    found = split(whole, sizes, **more)
    number = 2 if dist.get_world_size() != 3 else 3
    rank = dist.get_rank() if "tp_size" not in sizes else dist.get_rank() // sizes["tp_size"]
    x = torch.randn(number, 3, 6, dtype=torch.float64)
    found(x[rank], rank).square().mean().backward()
    for one in range(number):
        (whole(x[one], one).square().mean() / number).backward()
    compare(found, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", DATA, ids=str)
def test_experts_that_some_ranks_use(sizes: dict[str, int]) -> None:
    routed(sizes, Layered)
    routed(sizes, Routed, fsdp_plan={"experts.*": "root"})


@pytest.mark.ranks(3, 4)
def test_experts_over_more_ranks() -> None:
    three = {"dp_shard_size": 3}
    routed(three if dist.get_world_size() == 3 else {"dp_shard_size": 2, "tp_size": 2}, Layered)


@pytest.mark.ranks(2)
def test_experts_in_bfloat16() -> None:
    torch.manual_seed(0)
    whole = Layered().bfloat16()
    found, rank = split(whole, {"dp_shard_size": 2}), dist.get_rank()
    x = torch.randn(2, 3, 6, dtype=torch.bfloat16)
    found(x[rank], rank).square().mean().backward()
    for one in range(2):
        (whole(x[one], one).square().mean() / 2).backward()
    grads = plait.full_grads(found)
    for name, param in whole.named_parameters():
        if param.grad is not None:
            limit = 5e-2 * param.grad.abs().max() + 1e-3
            assert (grads[name] - param.grad).abs().max() < limit, name


@pytest.mark.ranks(2)
def test_the_comparison_of_experts_notices() -> None:
    with mutation.must_fail(unused._Group, "fill", lambda self, params: None):
        routed({"dp_replicate_size": 2}, Layered)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("linked", [True, False])
def test_groups_that_some_ranks_begin_are_an_error(linked: bool, monkeypatch: Any) -> None:
    if not linked:
        monkeypatch.setattr(visits.comm, "is_linked", lambda mesh: False)
    with pytest.raises(RankError, match=r"data rank 1 begins experts\.1"):
        routed({"dp_shard_size": 2}, Routed)


class LeavesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers[:number]:
            x = layer(x).tanh()
        return x


@pytest.mark.ranks(2)
def test_layers_that_some_ranks_leave_out_are_an_error(rank: int) -> None:
    found = split(LeavesOut(), {"dp_shard_size": 2})
    found(torch.ones(2, 6), 2).sum().backward()  # together it is no mistake
    with pytest.raises(RankError, match="data rank 1 is at its end"):
        found(torch.ones(2, 6), 3 if rank == 0 else 2)
    with plait.gathered(found):  # inside, each goes its own way
        found(torch.ones(2, 6), 3 if rank == 0 else 2)


class Normalised(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 6, 1), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6, momentum=momentum)
        self.plain = nn.BatchNorm1d(6, affine=False, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu().mean(-1)
        return self.last(self.plain(x))


def normalised(sizes: dict[str, Any], momentum: float | None = 0.1) -> None:
    torch.manual_seed(0)
    whole = Normalised(momentum).double()
    found = split(whole, sizes)
    state = plait.state.state_of(found)
    assert state is not None and state.data_mesh is not None
    ranks, rank = state.num_data_ranks, state.data_mesh.get_local_rank()
    for step in range(3):
        x = torch.randn(2 * ranks + step * ranks, 4, 5, dtype=torch.float64)
        mine = found(x.chunk(ranks)[rank])
        expected = whole(x)
        assert (mine - expected.chunk(ranks)[rank]).abs().max() < 1e-12
        mine.square().mean().backward()
        expected.square().mean().backward()
        compare(found, whole)
    wanted = whole.state_dict()
    for name, x in plait.full_state_dict(found).items():
        assert (x.double() - wanted[name].double()).abs().max() < 1e-12, name
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    found.eval(), whole.eval()
    found.plain.train(), whole.plain.train()
    with torch.no_grad():
        found(x), whole(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_see_all_samples(momentum: float | None) -> None:
    normalised({"dp_shard_size": dist.get_world_size()}, momentum)


@pytest.mark.ranks(4)
def test_batch_norms_beside_tensor_parallel_ranks() -> None:
    normalised({"dp_replicate_size": 2, "tp_size": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["sum_from", "copy_to"])
def test_the_comparison_of_batch_norms_notices(name: str) -> None:
    with mutation.must_fail(batch_norm, name, lambda x, mesh: x):
        normalised({"dp_shard_size": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, *DATA], ids=str)
def test_optimizers_made_before_the_split_follow(sizes: dict[str, int]) -> None:
    whole = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = copy.deepcopy(whole)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = {"tp_plan": {"0": "colwise", "2": "rowwise"}} if "tp_size" in sizes else {}
    plait.parallelize(model, plait.DistributedConfig(**sizes), **plan)
    for each, optimizer in ((model, ours), (whole, theirs)):
        each(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    for name, x in plait.full_state_dict(model).items():
        assert torch.allclose(x, whole.state_dict()[name], atol=1e-6), name
    with pytest.raises(LayoutError, match="AdamW has a state for its parameters as they are now"):
        plait.parallelize(whole, SHARDED)
    assert all(type(param) is nn.Parameter for param in whole.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["config", "tp_plan", "model"])
def test_ranks_that_are_asked_for_different_things(what: str, rank: int) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    plan = {"0": "colwise", "2": "rowwise"}
    config = plait.DistributedConfig(tp_size=2)
    if what == "config" and rank == 1:
        config = SHARDED
    elif what == "tp_plan" and rank == 1:
        plan = {"0": "colwise_rep"}
    elif what == "model" and rank == 1:
        model = nn.ModuleDict({"0": model[0], "2": model[2]})
    with pytest.raises(RankError, match=f"rank 1: {what}="):
        plait.parallelize(model, config, plan)
    assert all(type(param) is nn.Parameter for param in model.parameters())


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:  # type: ignore[attr-defined]
                x = layer(x).tanh()
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["list of lists", "one layer"])
@pytest.mark.parametrize("sizes", DATA, ids=str)
def test_odd_forms_of_models(kind: str, sizes: dict[str, int], rank: int) -> None:
    torch.manual_seed(0)
    whole = (Staged() if kind == "list of lists" else nn.Linear(4, 4)).double()
    found = split(whole, sizes)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for _ in range(2):
        found(x[rank]).square().mean().backward()
        whole(x).square().mean().backward()
        compare(found, whole)


class Scale(nn.Linear):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__(4, 4)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Scaled(nn.Module):
    """Two blocks share a scale; another scale is used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        scale = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(Scale(scale) for _ in range(2))
        self.rare = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.rare if rarely else x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", DATA, ids=str)
def test_scalars_that_are_shared_or_used_by_some(sizes: dict[str, int], rank: int) -> None:
    torch.manual_seed(0)
    whole = Scaled().double()
    found = split(whole, sizes)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert found.layers[0].scale is found.layers[1].scale
    found(x[rank], rank == 0).square().mean().backward()
    for one in range(2):
        (whole(x[one], one == 0).square().mean() / 2).backward()
    compare(found, whole)


class BatchNormAct(nn.BatchNorm1d):
    """As others write it: a forward that does more than the class's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        ).relu()


@pytest.mark.ranks(2)
def test_batch_norms_with_a_forward_of_their_own() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), BatchNormAct(6), nn.Linear(6, 2)).double()
    found, rank = split(whole, {"dp_shard_size": 2}), dist.get_rank()
    x = torch.randn(6, 4, dtype=torch.float64)
    found(x.chunk(2)[rank]).square().mean().backward()
    whole(x).square().mean().backward()
    compare(found, whole)
    wanted = whole.state_dict()
    for name, value in plait.full_state_dict(found).items():
        assert torch.allclose(value, wanted[name]), name
    with plait.gathered(found):  # each rank by itself
        if rank == 0:
            found(x)


class Branches(nn.Module):
    """Two ways through a block, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.a, self.b, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        return self.a(x) if which == 0 else self.b(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("sizes", DATA, ids=str)
def test_branches_that_differ(sizes: dict[str, int], linked: bool, monkeypatch: Any) -> None:
    if not linked:
        monkeypatch.setattr(unused.comm, "is_linked", lambda mesh: False)
    routed(sizes, Branches)


class ScaledExpert(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class ScaledLayered(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].inner.experts = nn.ModuleList(ScaledExpert() for _ in range(4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mixed", [False, True])
def test_experts_with_scales_accumulated(mixed: bool) -> None:
    """Each rank uses one expert in the first micro-step, and another in the second."""
    torch.manual_seed(0)
    whole = ScaledLayered().double() if not mixed else Layered().float()
    found, rank = split(whole, {"dp_shard_size": 2}, fsdp_mixed_precision=mixed), dist.get_rank()
    dtype = torch.float32 if mixed else torch.float64
    x = torch.randn(2, 2, 3, 6, dtype=dtype)
    window = Window(2)
    for step in range(2):
        with window.micro_step(found, end=step == 1):
            window.backward(found(x[step, rank], rank + step).square().mean())
    for step in range(2):
        for one in range(2):
            (whole(x[step, one], one + step).square().mean() / 4).backward()
    if not mixed:
        compare(found, whole)
        return
    grads = plait.full_grads(found)
    for name, param in whole.named_parameters():
        if param.grad is not None:
            assert (grads[name] - param.grad).abs().max() < 2e-2 * param.grad.abs().max(), name


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("once")


class MayFail(ScaledLayered):
    fails = False

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return super().forward(Fails.apply(x.clone().requires_grad_()) if self.fails else x, which)


@pytest.mark.ranks(2)
def test_training_goes_on_after_a_backward_that_fails() -> None:
    torch.manual_seed(0)
    whole = MayFail().double()
    found, rank = split(whole, {"dp_shard_size": 2}), dist.get_rank()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    found.fails = True
    with pytest.raises(ValueError, match="once"):
        found(x[rank], rank).square().mean().backward()
    found.fails = False
    found.zero_grad()
    found(x[rank], rank).square().mean().backward()
    for one in range(2):
        (whole(x[one], one).square().mean() / 2).backward()
    compare(found, whole)


@pytest.mark.ranks(2)
def test_a_failure_of_one_data_rank_is_told_to_the_others(rank: int) -> None:
    found = split(LeavesOut(), {"dp_shard_size": 2})
    if rank == 0:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            found(torch.ones(2, 5), 2)
    else:
        with pytest.raises(RankError, match="rank 0"):
            found(torch.ones(2, 6), 2)
