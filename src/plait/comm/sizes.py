"""How an extent is divided among ranks when nobody says otherwise."""

from torch import Tensor

from plait.errors import RankError


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


def normal_dim(dim: int, x: Tensor) -> int:
    """`dim` counted from the front; refuses one that `x` does not have."""
    if not -x.ndim <= dim < x.ndim:
        raise RankError(
            f"a collective along dim {dim} of a tensor {tuple(x.shape)}",
            f"the tensor has {x.ndim} dimensions",
        )
    return dim % x.ndim
