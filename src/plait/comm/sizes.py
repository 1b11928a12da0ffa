"""How an extent is divided among ranks when nobody says otherwise."""

from functools import lru_cache

from plait.plan.intervals import even


@lru_cache(maxsize=1024)
def chunk_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Extents of `torch.chunk` (and DTensor's `Shard`): ceil(extent / parts) first, the rest last.

    Args:
        extent: The extent to divide.
        parts: Number of ranks.

    Returns:
        One extent per rank; the last ones may be zero.
    """
    return even((extent,), 0, parts).sizes
