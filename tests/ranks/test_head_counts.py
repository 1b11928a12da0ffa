"""Counts of heads under other names, arguments by head, and half precision of cut projections."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers.pytorch_utils import Conv1D

import plait
from plait.errors import LayoutError
from plait.plan.heads import Attention, head_map
from plait.styles import attention as styles_attention
from plait.styles.code import mentioned
from plait.testing import add_noise, mutation, parity

RULES = {
    "attn.q_proj": "colwise",
    "attn.k_proj": "colwise",
    "attn.v_proj": "colwise",
    "attn.o_proj": "rowwise",
}


class Heads(nn.Module):
    """An attention that calls its counts `nh` and `nkv`."""

    def __init__(self, nh: int = 6, nkv: int = 3, size: int = 4, kind: Any = nn.Linear) -> None:
        super().__init__()
        self.nh, self.nkv = nh, nkv

        def linear(into: int, out: int) -> nn.Module:
            return kind(out, into) if kind is Conv1D else kind(into, out)

        self.q_proj, self.k_proj = linear(12, nh * size), linear(12, nkv * size)
        self.v_proj, self.o_proj = linear(12, nkv * size), linear(nh * size, 12)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        made = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        self.seen = [one.dtype for one in made]
        counts = (self.nh, self.nkv, self.nkv)
        q, k, v = (
            one.view(b, t, n, -1).transpose(1, 2) for one, n in zip(made, counts, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class Holder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = Heads(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


def x_of() -> torch.Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.ranks(2)
def test_an_attention_whose_heads_are_not_known_is_refused() -> None:
    with pytest.raises(LayoutError, match="nothing tells how many heads") as caught:
        plait.parallelize(Holder(), tp_plan=RULES, check=False)
    assert "set num_heads or head_dim on the module" in str(caught.value)
    alone: Any = nn.Sequential()
    alone.query = nn.Linear(12, 12)
    plait.parallelize(alone, tp_plan={"query": "colwise_gather_output"})


@pytest.mark.ranks(2)
def test_counts_of_other_names_become_the_ranks() -> None:
    whole: Any = add_noise(Holder().double())
    whole.attn.head_dim = 4

    def check() -> None:
        split: Any = copy.deepcopy(whole)
        plait.parallelize(split, tp_plan=RULES, check=False)
        parity.compare(split, whole, {"x": x_of()})

    check()
    with mutation.must_fail(styles_attention, "_other_counts", lambda *_: [], BaseException):
        check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counts", [(6, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("conv", [False, True])
def test_autocast_of_heads(counts: tuple[int, int], conv: bool) -> None:
    nh, nkv = counts
    whole: Any = add_noise(Holder(nh=nh, nkv=nkv, kind=Conv1D if conv else nn.Linear))
    whole.attn.head_dim = 4
    split: Any = copy.deepcopy(whole)
    plait.parallelize(split, tp_plan=RULES, check=False)
    x = x_of().float()
    for grads in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grads):
            torch.testing.assert_close(split(x), whole(x), rtol=0.05, atol=0.05)
        assert split.attn.seen == whole.attn.seen == [torch.bfloat16] * 3


@pytest.mark.ranks(2)
def test_a_whole_dtensor_into_a_weight_cut_on_heads() -> None:
    whole: Any = add_noise(Holder(nh=3, nkv=3, size=3).double())
    whole.attn.head_dim = 3
    split: Any = copy.deepcopy(whole)
    plait.parallelize(split, tp_plan=RULES, check=False)
    features = torch.randn(2, 9, dtype=torch.float64, generator=torch.manual_seed(0))
    mesh = split.attn.o_proj.weight.device_mesh
    given = distribute_tensor(features, mesh, [Replicate()])
    torch.testing.assert_close(split.attn.o_proj(given), whole.attn.o_proj(features))


@pytest.mark.ranks(2)
def test_widths_of_heads_with_values_of_another_size() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module: Any = Both()
    module.num_heads, module.q_dim, module.inner_dim = 4, 4 * 8, 4 * 6
    found = Attention("a", 8, 6, head_map(4, 4, 2))
    styles_attention.localize(module, found, init_device_mesh("cpu", (2,)))
    assert (module.num_heads, module.q_dim, module.inner_dim) == (2, 16, 12)


@pytest.mark.ranks(2)
def test_which_arguments_have_a_row_for_every_head() -> None:
    class Many(nn.Module):
        def forward(self, x: Any, freqs: Any, position_bias: Any, attention_mask: Any) -> Any:
            return freqs, position_bias, attention_mask

    module: Any = Many()
    found = Attention("a", 8, 8, head_map(4, 4, 2))
    styles_attention.localize(module, found, init_device_mesh("cpu", (2,)))
    x, freqs, mask = torch.zeros(2, 5, 16), torch.zeros(1, 4, 1, 8), torch.zeros(2, 1, 5, 5)
    for rows, expected in ((8, 4), (4, 2), (12, 12)):
        given = module(x, freqs, torch.zeros(rows, 5, 5), mask)
        assert [one.shape[0] for one in given] == [1, expected, 2]
        assert given[0].shape == freqs.shape
    named = module(x, freqs, attention_mask=mask, position_bias=torch.zeros(2, 4, 5, 5))
    assert named[1].shape == (2, 2, 5, 5)


def test_code_inside_functions_and_decorators_is_read() -> None:
    import functools

    def decorated(method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(*args: Any) -> Any:
            return method(*args)

        return wrapped

    class Reads(nn.Module):
        @decorated
        def forward(self, x: Any) -> Any:
            return [(lambda y: y * self.inner_heads)(one) for one in x]

    assert "inner_heads" in mentioned(Reads)
