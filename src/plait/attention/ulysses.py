"""Attention by exchange: each rank trades its tokens of all heads for all tokens of some heads.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
    Long Sequence Transformer Models" (2023). That exchanges q, k and v one by one and wants counts
    of heads that divide; here one exchange carries all three, and ranks get whole heads in any
    number, a key/value head going to every rank whose query heads meet it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.plan.heads import head_map


@dataclass(frozen=True)
class HeadShares:
    """Which heads each rank of an exchange computes.

    Attributes:
        query: Per rank, its query heads: a stretch, empty where there are more ranks than heads.
        kv: Per rank, the key/value heads that these meet, a stretch likewise.
        meets: Per rank, for each of its query heads the place of its key/value head in `kv`.
    """

    query: tuple[tuple[int, int], ...]
    kv: tuple[tuple[int, int], ...]
    meets: tuple[tuple[int, ...], ...]

    def is_even(self, rank: int) -> bool:
        """Whether every key/value head of a rank meets as many query heads, in order."""
        meets, count = self.meets[rank], self.kv[rank][1] - self.kv[rank][0]
        if not count or len(meets) % count:
            return not count
        group = len(meets) // count
        return meets == tuple(place for place in range(count) for _ in range(group))


@lru_cache(maxsize=1024)
def head_shares(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadShares:
    """Deal the heads of one attention out over the ranks of an exchange.

    Args:
        num_heads: Query heads that this rank's attention has (under tensor parallelism: its own).
        num_kv_heads: Its key/value heads; they divide `num_heads`.
        num_ranks: Ranks that exchange. With more ranks than heads the last ones compute none.

    Raises:
        LayoutError: The key/value heads do not divide the query heads.
    """
    used = min(num_heads, num_ranks)
    found = head_map(num_heads, num_kv_heads, used)
    group = num_heads // num_kv_heads
    query = [(heads[0], heads[-1] + 1) for heads in found.query]
    kv = [(heads[0], heads[-1] + 1) for heads in found.kv]
    meets = [
        tuple(head // group - first for head in heads)
        for heads, (first, _) in zip(found.query, kv, strict=True)
    ]
    idle = num_ranks - used
    return HeadShares(
        (*query, *[(num_heads, num_heads)] * idle),
        (*kv, *[(num_kv_heads, num_kv_heads)] * idle),
        (*meets, *[()] * idle),
    )


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], mesh: DeviceMesh
) -> tuple[Tensor, Tensor, Tensor]:
    """Trade tokens of all heads for all tokens of this rank's heads.

    Args:
        q: `[batch, heads, seq_local, qk_dim]`.
        k: `[batch, kv_heads, seq_local, qk_dim]`.
        v: `[batch, kv_heads, seq_local, v_dim]`.
        lengths: Tokens of each rank.
        mesh: The ranks that exchange.

    Returns:
        The same three with `sum(lengths)` tokens and this rank's heads. Where its query heads meet
        the key/value heads unevenly, these are repeated, one for each query head.

    Comm: one all-to-all; another in the backward. Elements that leave a rank in each:
        `batch × seq_local × (heads_away × qk_dim + kv_heads_away × (qk_dim + v_dim))`, where *away*
        counts the heads that each other rank computes.
    """
    shares = head_shares(q.shape[1], k.shape[1], mesh.size())
    batch, rank = q.shape[0], mesh.get_local_rank()
    pieces = [
        torch.cat([_heads(x, span) for x, span in zip((q, k, v), spans, strict=True)])
        for spans in zip(shares.query, shares.kv, shares.kv, strict=True)
    ]
    mine = (shares.query[rank], shares.kv[rank], shares.kv[rank])
    counts = [stop - start for start, stop in mine]
    rows = [batch * count * x.shape[-1] for count, x in zip(counts, (q, k, v), strict=True)]
    received = comm.exchange_pieces(pieces, mesh, [(n * sum(rows),) for n in lengths])
    parts = [
        piece.split([row * n for row in rows]) for piece, n in zip(received, lengths, strict=True)
    ]
    whole = [
        torch.cat(
            [
                part[i].view(batch, counts[i], n, x.shape[-1])
                for part, n in zip(parts, lengths, strict=True)
            ],
            2,
        )
        for i, x in enumerate((q, k, v))
    ]
    if not shares.is_even(rank):
        index = torch.tensor(shares.meets[rank], device=k.device)
        whole[1:] = [x.index_select(1, index) for x in whole[1:]]
    return whole[0], whole[1], whole[2]


def to_tokens(
    x: Tensor, num_heads: tuple[int, int], lengths: Sequence[int], mesh: DeviceMesh
) -> Tensor:
    """Trade all tokens of this rank's heads for this rank's tokens of all heads.

    Args:
        x: `[batch, heads of this rank, sum(lengths), dim]`.
        num_heads: Query heads and key/value heads of all ranks.
        lengths: Tokens of each rank.
        mesh: The ranks that exchange.

    Returns:
        `[batch, query heads, lengths[rank], dim]`.

    Comm: one all-to-all; another in the backward.
    """
    shares = head_shares(*num_heads, mesh.size())
    batch, dim, own = x.shape[0], x.shape[-1], lengths[mesh.get_local_rank()]
    pieces = [piece.reshape(-1) for piece in x.split(list(lengths), 2)]
    counts = [stop - start for start, stop in shares.query]
    received = comm.exchange_pieces(pieces, mesh, [(batch * n * own * dim,) for n in counts])
    parts = [part.view(batch, n, own, dim) for part, n in zip(received, counts, strict=True)]
    return torch.cat(parts, 1)


def _heads(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x[:, span[0] : span[1]].reshape(-1)
