"""Attention of plain modules: heads of any number, found from names and integers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import LayoutError
from plait.plan.heads import head_map
from plait.state import state_of
from plait.styles import heads as heads_room
from plait.styles import linear_forwards
from plait.testing import add_noise, mutation, parity


class Attention(nn.Module):
    """Grouped attention with separate projections."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int = 4, width: int = 12):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, self.num_heads * self.head_dim))


class Block(nn.Module):
    """An attention and an MLP in modules of their own."""

    def __init__(self, num_heads: int, num_kv_heads: int, width: int = 12) -> None:
        super().__init__()
        self.attn = Attention(num_heads, num_kv_heads, width=width)
        self.up = nn.Linear(width, 14)
        self.down = nn.Linear(14, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.down(F.gelu(self.up(x)))


class Flat(Attention):
    """Everything in one module: projections of the attention beside those of the MLP."""

    def __init__(self, num_heads: int, num_kv_heads: int, width: int = 12) -> None:
        super().__init__(num_heads, num_kv_heads, width=width)
        self.up = nn.Linear(width, 14)
        self.down = nn.Linear(14, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + super().forward(x)
        return x + self.down(F.gelu(self.up(x)))


class Nested(Attention):
    """Projections of the attention beside a module with an MLP."""

    def __init__(self, num_heads: int, num_kv_heads: int, width: int = 12) -> None:
        super().__init__(num_heads, num_kv_heads, width=width)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 14), "down": nn.Linear(14, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + super().forward(x)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](x)))


class Stack(nn.Module):
    def __init__(self, kind: Any, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(num_heads, num_kv_heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {
    "layers.*.attn.q_proj": "colwise",
    "layers.*.attn.k_proj": "colwise",
    "layers.*.attn.v_proj": "colwise",
    "layers.*.attn.o_proj": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
COUNTS = [(9, 3), (5, 1), (7, 7), (4, 2)]


def x_of(size: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, length, 12, dtype=torch.float64, generator=draw)}


def pair(kind: Any, counts: tuple[int, int], plan: Any, **options: Any) -> tuple[Any, Any]:
    whole = add_noise(Stack(kind, *counts).double())
    split = copy.deepcopy(whole)
    return plait.parallelize(split, tp_plan=plan, **options), whole


def world() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("counts", COUNTS)
def test_an_attention_that_transformers_never_saw(counts: tuple[int, int]) -> None:
    split, whole = pair(Block, counts, PLAN)
    for size in (1, 2, 3):
        parity.compare(split, whole, x_of(size, length=2 * size + 1))
    heads, rank = head_map(*counts, world()), torch.distributed.get_rank()
    attention = split.layers[0].attn
    assert (attention.num_heads, attention.num_kv_heads) == (
        len(heads.places(rank)),
        len(heads.kv[rank]),
    )


@pytest.mark.ranks(2)
def test_that_test_notices_heads_that_meet_another_key_value_head() -> None:
    split, whole = pair(Block, (9, 3), PLAN)
    parity.compare(split, whole, x_of())

    def reversed_pieces(x: torch.Tensor, dim: int, pieces: Any) -> torch.Tensor:
        return heads_room.rearranged(x, dim, pieces).flip(dim)

    with mutation.must_fail(linear_forwards, "rearranged", reversed_pieces):
        parity.compare(split, whole, x_of())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("counts", [(9, 3), (5, 1)])
@pytest.mark.parametrize("kind", [Flat, Nested])
def test_an_attention_beside_an_mlp_in_one_module(kind: Any, counts: tuple[int, int]) -> None:
    plan = {n.replace(".up", ".mlp.up").replace(".down", ".mlp.down"): s for n, s in PLAN.items()}
    plan = {n.replace(".attn", ""): s for n, s in (PLAN if kind is Flat else plan).items()}
    split, whole = pair(kind, counts, plan)
    parity.compare(split, whole, x_of())
    state = state_of(split)
    assert state is not None
    assert state.plan.attention["layers.0"].heads == head_map(*counts, world())
    assert not any("up" in name or "down" in name for name in state.plan.cuts)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [Block, Flat])
def test_a_plan_that_is_derived_and_proven_on_a_batch(kind: Any) -> None:
    split, whole = pair(kind, (9, 3), None, check=x_of())
    parity.compare(split, whole, x_of())
    state = state_of(split)
    # What stands beside an attention in its module keeps a derived plan from splitting its heads.
    assert state is not None and len(state.plan.attention) == (2 if kind is Block else 0)


@pytest.mark.ranks(4)
def test_more_ranks_than_heads_and_attention_that_is_split_in_part_are_refused() -> None:
    with pytest.raises(LayoutError, match="4 ranks for 3 query heads") as caught:
        pair(Block, (3, 1), PLAN)
    assert "replicate" in str(caught.value)
    with pytest.raises(LayoutError, match="'v_proj' has the style 'replicate'"):
        pair(Block, (9, 3), PLAN | {"layers.*.attn.v_proj": "replicate"})
    whole_attention = {n: "replicate" for n in PLAN if ".attn." in n}
    split, whole = pair(Block, (3, 1), PLAN | whole_attention)
    parity.compare(split, whole, x_of())
