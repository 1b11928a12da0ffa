"""Attention over a ring of ranks: keys and values travel, queries stay.

At hop `t` rank `r` works on the block of rank `r - t`, while that of rank `r - t - 1` is on its way
to it. A block goes on only as far as the last rank that attends to any of it, which every rank
computes from the description of the mask, so that nobody waits for what nobody sends.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
    Context" (2023); the order that balances causal work is that of Brandon et al., "Striped
    Attention" (2023) and of the zig-zag chunks in widespread use since.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.attention.kernels import (
    Settings,
    Triple,
    backward_block,
    forward_block,
    merge_,
    wide,
)
from plait.attention.masks import MaskSpec
from plait.attention.sinks import grad_of_sinks, with_sinks_
from plait.attention.spans import Tokens
from plait.attention.work import Work, work_of
from plait.comm.once import first_order


@dataclass(frozen=True)
class Route:
    """How the blocks of one call travel, as seen from one rank.

    Attributes:
        rank: This rank's place on the ring.
        works: For each rank, what this rank's queries do with that rank's keys.
        reach: For each rank, how many hops its block makes at most: up to the last rank that
            attends to it.
        lengths: For each rank, its number of tokens.
    """

    rank: int
    works: tuple[Work, ...]
    reach: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks on the ring."""
        return len(self.works)

    @property
    def num_hops(self) -> int:
        """How many hops the ranks take together, the first one without a shift."""
        return max(self.reach) + 1

    def block(self, hop: int) -> int:
        """Whose block is here at a hop."""
        return (self.rank - hop) % self.size

    def is_here(self, hop: int) -> bool:
        """Whether a block comes by at a hop."""
        return hop < self.size and self.reach[self.block(hop)] >= hop


def route_of(spec: MaskSpec, tokens: Sequence[Tokens], rank: int, batch: int) -> Route:
    """The route for a mask.

    Args:
        spec: The mask, in global coordinates; the same on all ranks.
        tokens: Which tokens each rank of the ring holds.
        rank: This rank's place.
        batch: Sequences side by side.

    Comm: none.
    """
    size = len(tokens)
    works = tuple(work_of(spec, tokens[rank], keys, batch) for keys in tokens)
    reach = []
    for owner, keys in enumerate(tokens):
        hops = (
            hop
            for hop in range(size - 1, 0, -1)
            if not work_of(spec, tokens[(owner + hop) % size], keys, batch).is_empty
        )
        reach.append(next(hops, 0))
    return Route(rank, works, tuple(reach), tuple(len(held) for held in tokens))


def ring_attention(
    qkv: Triple,
    route: Route,
    mesh: DeviceMesh,
    settings: Settings,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of a ring.

    Args:
        qkv: `[batch, heads, seq_local, qk_dim]`, `[batch, kv_heads, seq_local, qk_dim]` and
            `[batch, kv_heads, seq_local, v_dim]`; `kv_heads` divide `heads`.
        route: From `route_of`.
        mesh: The ring.
        settings: Scale and softcap.
        sinks: `[heads]`, or None.

    Returns:
        `[batch, heads, seq_local, v_dim]` in the dtype of the queries.

    Raises:
        RankError: A rank has left.

    Comm: forward, each block to its reach: at most `size - 1` shifts of the keys and values of one
        rank. Backward, the same again and, beside them, their gradients in the dtype of sums,
        which one all-to-all brings home.
    """
    out: Tensor = _Ring.apply(*qkv, route, mesh, settings, sinks)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        mesh: DeviceMesh,
        settings: Settings,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.route, ctx.mesh, ctx.settings = route, mesh, settings
        ring, dtype = comm.Ring(mesh), wide(q.dtype)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        here: tuple[Tensor, ...] = (k, v)
        for hop in range(route.num_hops):
            coming = _pass_on(ring, route, hop, here, (k, v))
            if route.is_here(hop):
                work = route.works[route.block(hop)]
                merge_(out, lse, *forward_block(q, here[0], here[1], work, settings))
            here = coming()
        with_sinks_(out, lse, sinks)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        return result

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        route, settings, dtype = ctx.route, ctx.settings, lse.dtype
        ring = comm.Ring(ctx.mesh)
        grad_q = torch.zeros_like(q, dtype=dtype)
        here: tuple[Tensor, ...] = (k, v)
        sums = _zeros(here, dtype)
        home: dict[int, tuple[Tensor, ...]] = {}
        for hop in range(route.num_hops):
            owner = route.block(hop)
            coming = _pass_on(ring, route, hop, here, (k, v))
            if route.is_here(hop):
                work = route.works[owner]
                found = backward_block(grad_out, (q, here[0], here[1]), (out, lse), work, settings)
                grad_q += found[0]
                for total, part in zip(sums, found[1:], strict=True):
                    total += part
                if route.reach[owner] == hop:
                    home[owner] = sums
            moving = _pass_on(ring, route, hop, sums, (k, v), dtype)
            here, sums = coming(), moving()
        grad_k, grad_v = _bring_home(home, route, ctx.mesh, (k, v), dtype)
        grads = [x.to(like.dtype) for x, like in ((grad_q, q), (grad_k, k), (grad_v, v))]
        return *grads, None, None, None, grad_of_sinks(grad_out, out, lse, sinks)


def _zeros(like: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x, dtype=dtype) for x in like)


def _pass_on(
    ring: comm.Ring,
    route: Route,
    hop: int,
    mine: Sequence[Tensor],
    like: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to pass a block on, if it goes on; a call of the result waits for the next one.

    Args:
        ring: The ring.
        route: Of the blocks.
        hop: The hop that runs now.
        mine: What is here.
        like: Tensors as this rank's own block has them.
        dtype: Of what travels; None: that of `like`.
    """
    sends = route.is_here(hop) and route.reach[route.block(hop)] > hop
    takes = route.is_here(hop + 1)
    length = route.lengths[route.block(hop + 1)]
    pending = ring.start(
        mine if sends else None,
        [(*x.shape[:2], length, x.shape[-1]) for x in like] if takes else None,
        dtype=like[0].dtype if dtype is None else dtype,
        device=like[0].device,
    )
    return lambda: tuple(pending.wait())


def _bring_home(
    home: dict[int, tuple[Tensor, ...]],
    route: Route,
    mesh: DeviceMesh,
    like: Sequence[Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Each block's gradient from the last rank of its way to its owner."""
    if not any(route.reach):
        return home[route.rank]
    last = (route.rank + route.reach[route.rank]) % route.size
    empty = like[0].new_empty(0, dtype=dtype)
    pieces = [
        torch.cat([x.reshape(-1) for x in home[owner]]) if owner in home else empty
        for owner in range(route.size)
    ]
    numels = [x.numel() for x in like]
    shapes = [(sum(numels),) if sender == last else (0,) for sender in range(route.size)]
    parts = comm.all_to_all(pieces, mesh, shapes)[last].split(numels)
    return tuple(part.view(x.shape) for part, x in zip(parts, like, strict=True))
