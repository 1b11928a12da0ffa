"""How many heads a small copy needs for its attention to be as hard to split as the original's."""

from typing import Any

from plait.hf.small import fields as table
from plait.hf.small.sizes import choose, nearest_kv, ratio_of
from plait.plan.heads import head_map


def hard_heads(config: Any, num_ranks: int) -> tuple[int | None, int | None]:
    """Counts for a small copy whose heads lie on the ranks as awkwardly as the original's.

    Heads that do not divide, and key/value heads that several ranks need, are what goes wrong; four
    heads over two ranks would show neither. The counts looked at are those of the part that has
    fewer key/value heads, else of the text part.

    Args:
        config: The original.
        num_ranks: Ranks to split over.

    Returns:
        `heads` and `kv_heads` for `small_config`, both None where its own choice is right.

    >>> _fewest((9, 3), 2), _fewest((25, 5), 2), _fewest((32, 8), 3)
    ((9, 3), (9, 3), (8, 4))
    """
    kv, heads = ratio_of(config)
    has_kv = kv < heads
    if not has_kv:
        kv = heads = _query_heads(config)
    if heads < num_ranks or heads % kv:
        return None, None  # the plan of the original will say so
    own = choose(config, None, None, None, 1).heads
    own_kv = nearest_kv(own, heads, kv)
    if own >= num_ranks and _layout(own, own_kv, num_ranks) == _layout(heads, kv, num_ranks):
        return None, None
    found = _fewest((heads, kv), num_ranks)
    return found[0], found[1] if has_kv else None


def _query_heads(config: Any) -> int:
    text = vars(config.get_text_config())
    names = [n for n in ("num_attention_heads", *sorted(table.QUERY_HEADS)) if n in text]
    return next((text[n] for n in names if isinstance(text[n], int) and text[n] > 0), 1)


def _fewest(counts: tuple[int, int], num_ranks: int) -> tuple[int, int]:
    """The smallest counts that are laid out like the given ones, or these themselves."""
    wanted = _layout(*counts, num_ranks)
    for heads in range(max(num_ranks, min(4, counts[0])), counts[0]):
        for kv in (n for n in range(1, heads + 1) if heads % n == 0):
            if _layout(heads, kv, num_ranks) == wanted:
                return heads, kv
    return counts


def _layout(heads: int, kv_heads: int, num_ranks: int) -> tuple[bool, ...]:
    """What makes the heads of an attention hard to split."""
    found = head_map(heads, kv_heads, num_ranks)
    ranks = range(num_ranks)
    return (
        kv_heads == 1,
        kv_heads == heads,
        found.is_shared,
        any(len(found.places(rank)) > len(found.query[rank]) for rank in ranks),
        len({len(found.query[rank]) for rank in ranks}) > 1,
        len({len(found.kv[rank]) for rank in ranks}) > 1,
    )
