"""How an extent is divided among ranks when nobody says otherwise."""


def chunk_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Extents of `torch.chunk` (and DTensor's `Shard`): ceil(extent / parts) first, the rest last.

    Args:
        extent: The extent to divide.
        parts: Number of ranks.

    Returns:
        One extent per rank; the last ones may be zero.
    """
    step = -(-extent // parts)
    return tuple(max(0, min(step, extent - step * r)) for r in range(parts))
