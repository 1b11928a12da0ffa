"""Statistics over a split width: every torch function that takes one, and half precision."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import PlanError
from plait.styles import whole_statistics
from plait.testing import add_noise, mutation, parity


def scaled(x: torch.Tensor, moments: Any) -> torch.Tensor:
    return (x - moments[1]) / moments[0]


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x / x.square().mean(-1, keepdim=True).sqrt(),
    "mean of an axis": lambda x: x - x.mean(axis=-1, keepdim=True),  # type: ignore[call-overload]
    "sum": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 41),
    "norm": lambda x: x / x.norm(2, dim=-1, keepdim=True),
    "norm of torch": lambda x: x / torch.norm(x, dim=-1, keepdim=True),
    "norm of order 3": lambda x: x / x.norm(3, -1, True),
    "vector norm": lambda x: x / torch.linalg.vector_norm(x, dim=-1)[..., None],
    "linalg norm": lambda x: x / torch.linalg.norm(x, ord=2, dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "var_mean": lambda x: scaled(x, torch.var_mean(x, -1, keepdim=True)),
    "std_mean": lambda x: scaled(x, torch.std_mean(x, dim=-1, keepdim=True)),
    "var": lambda x: x / x.var(-1, unbiased=False, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (41,)),
    "rms_norm": lambda x: F.rms_norm(x, (41,)),
}


class Norm(nn.Module):
    def __init__(self, width: int, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.take(x)


class Normed(nn.Module):
    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor], width: int = 41) -> None:
        super().__init__()
        self.up = nn.Linear(16, width)
        self.norm = Norm(width, norm)
        self.down = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


PLAN = {"up": "colwise", "norm": "split_norm", "down": "rowwise"}


def x_of(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def pair(whole: nn.Module, plan: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    add_noise(whole.double())
    split = copy.deepcopy(whole)
    return plait.parallelize(split, tp_plan=plan), whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_in_every_way_that_torch_offers(name: str) -> None:
    split, whole = pair(Normed(NORMS[name]), PLAN)
    parity.compare(split, whole, {"x": x_of(2, 3, 16)})
    with mutation.must_fail(whole_statistics, "sum_from", lambda x, mesh: x):
        parity.compare(split, whole, {"x": x_of(2, 3, 16)})


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reads a size": lambda x: x * x.shape[-1] ** 0.5 / x.norm(2, dim=-1, keepdim=True),
    "of the order inf": lambda x: x / x.norm(float("inf"), dim=-1, keepdim=True),
    "over the dims None": lambda x: x / x.mean(),
    "took no mean": lambda x: x / x.amax(-1, keepdim=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("message", REFUSED)
def test_norms_that_cannot_be_taken_are_refused(message: str) -> None:
    split, _ = pair(Normed(REFUSED[message]), PLAN)
    with pytest.raises(PlanError, match=message):
        split(x_of(2, 16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    sizes = (150 + 10 * x_of(2, 512, dtype=torch.float32)).to(dtype)  # the sum overflows float16
    for take in (lambda x: x.mean(-1, True) + x, lambda x: F.layer_norm(x, (512,))):
        norm: Any = nn.Sequential()
        norm.up, norm.norm = nn.Linear(512, 512, bias=False), Norm(512, take)
        with torch.no_grad():
            norm.up.weight.copy_(torch.eye(512))
        expected = norm.to(dtype)(sizes)
        plan = {"up": "colwise", "norm": "split_norm"}
        split = plait.parallelize(copy.deepcopy(norm), tp_plan=plan)
        rank = torch.distributed.get_rank()
        torch.testing.assert_close(split(sizes), expected.chunk(2, -1)[rank], atol=0.01, rtol=0.01)


@pytest.mark.ranks(2)
def test_an_rms_norm_without_eps_has_that_of_torch() -> None:
    whole: Any = nn.Sequential()
    whole.up, whole.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)
    with torch.no_grad():
        whole.up.weight.copy_(torch.eye(8))
    whole.bfloat16()
    x = torch.full((1, 8), 1e-4, dtype=torch.bfloat16)
    expected = whole(x)
    plait.parallelize(whole, tp_plan={"up": "colwise", "norm": "split_norm"})
    torch.testing.assert_close(whole(x), expected[:, :4])


class Sparse(nn.Module):
    """Keeps large activations; a gate beside it is as wide as one rank's part."""

    def __init__(self, width: int = 21, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.up = nn.Linear(16, width * (2 if fused else 1))
        self.gate = nn.Linear(16, 10)
        self.down = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.up(x), self.gate(x)
        if self.fused:
            a, b = h.chunk(2, -1)
            h = torch.tanh(a) * b
        cut = h.mean(-1, keepdim=True) + 0.5 * torch.std(h, dim=-1, keepdim=True, unbiased=False)
        out = self.down(F.relu(h - cut))
        return out - out.mean(-1, keepdim=True) + gate / gate.std(-1, keepdim=True)


class Holder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mlp = Sparse(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_of_unequal_width_take_the_same_statistics(fused: bool) -> None:
    style = "packed_colwise" if fused else "colwise"
    plan = {"mlp": "split_statistics", "mlp.up": style, "mlp.down": "rowwise"}
    split, whole = pair(Holder(fused=fused), plan)
    parity.compare(split, whole, {"x": x_of(2, 3, 16)})
