"""Attention of one forward over all ranks that share its sequences."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plait.attention.kernels import Settings
from plait.attention.local import attend
from plait.attention.masks import MaskSpec
from plait.attention.ring import ring_attention, route_of
from plait.attention.sharing import SharedSequences
from plait.attention.spans import Tokens, joined
from plait.attention.ulysses import head_shares, to_heads, to_tokens
from plait.attention.work import work_of


def attend_over_ranks(
    qkv: tuple[Tensor, Tensor, Tensor],
    spec: MaskSpec,
    sequences: SharedSequences,
    settings: Settings,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's tokens to those of all ranks that share the sequences.

    Args:
        qkv: `[batch, heads, seq_local, qk_dim]`, `[batch, kv_heads, seq_local, qk_dim]` and
            `[batch, kv_heads, seq_local, v_dim]`.
        spec: The mask, in coordinates of the whole sequences.
        sequences: Who holds which tokens.
        settings: Scale and softcap.
        sinks: `[heads]`, or None.

    Returns:
        `[batch, heads, seq_local, v_dim]`.

    Comm: over the ranks that exchange heads (sp) one all-to-all before and one after; over the ring
        (cp) what `ring_attention` says. The backward likewise.
    """
    q, k, v = qkv
    axes = sequences.axes
    if axes.sp is None:
        return _inner(q, k, v, spec, sequences, settings, sinks)
    num_heads, num_kv_heads, sp = q.shape[1], k.shape[1], axes.sp
    place = axes.place // axes.sp_size * axes.sp_size
    lengths = [len(held) for held in sequences.tokens[place : place + axes.sp_size]]
    q, k, v = to_heads(q, k, v, lengths, sp)
    if sinks is not None:
        start, stop = head_shares(num_heads, num_kv_heads, sp.size()).query[sp.get_local_rank()]
        sinks = sinks[start:stop]
    out = _inner(q, k, v, spec, sequences, settings, sinks)
    return to_tokens(out, (num_heads, num_kv_heads), lengths, sp)


def _inner(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: MaskSpec,
    sequences: SharedSequences,
    settings: Settings,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of all tokens of a place of the ring, on this rank's heads."""
    axes, batch = sequences.axes, q.shape[0]
    places = _ring_places(sequences)
    if axes.cp is None:
        return attend(q, k, v, work_of(spec, places[0], places[0], batch), settings, sinks)
    rank = axes.cp.get_local_rank()
    key: Any = ("route", id(spec))
    if key not in sequences.routes:
        sequences.routes[key] = (spec, route_of(spec, places, rank, batch))
    route = sequences.routes[key][1]
    return ring_attention((q, k, v), route, axes.cp, settings, sinks)


def _ring_places(sequences: SharedSequences) -> Sequence[Tokens]:
    """Which tokens each place of the ring holds, all ranks that exchange heads together."""
    size = sequences.axes.sp_size
    known: Sequence[Tokens] | None = sequences.routes.get("places")
    if known is None:
        tokens = sequences.tokens
        known = [joined(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        sequences.routes["places"] = known
    return known
