"""How what a rank has of a tensor is related to the whole tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import all_reduce, exchange
from plait.plan.intervals import Pieces
from plait.proof.numbers import gap_and_scale, ratio
from plait.proof.record import Key

Relation = Literal["equal", "slice", "terms", "different", "unknown", "missing"]
"""Equal to the whole; a slice of it; a term of a sum over the ranks; none of these; of another
shape; not there on every rank."""

_CANDIDATES = 4
"""Columns of the whole that are tried for one of a rank, by the nearness of a projection."""


@dataclass(frozen=True)
class Match:
    """How one tensor of the split model is related to the whole one, on all ranks.

    Attributes:
        relation: In words.
        gap: Largest difference on any rank; where shapes differ, infinite.
        scale: Largest value of the whole tensor.
        numel: Its number of elements.
    """

    relation: Relation
    gap: float = 0.0
    scale: float = 0.0
    numel: int = 0

    @property
    def relative(self) -> float:
        """The difference as a fraction of the scale."""
        return ratio(self.gap, self.scale)


def relate(
    whole: Mapping[Key, torch.Tensor],
    split: Mapping[Key, torch.Tensor],
    *,
    mesh: DeviceMesh,
    tolerance: float,
    pieces: Mapping[str, Sequence[Pieces]],
    floor: float = 0.0,
) -> dict[Key, Match]:
    """Relate every tensor of a split run to the whole run's.

    Args:
        whole: Those of the whole run, the same on every rank.
        split: This rank's.
        mesh: The axis.
        tolerance: Largest difference ÷ scale that counts as none.
        pieces: Module name → which ranges of its output features each rank gives, where known.
        floor: The scale of a tensor is at least this.

    Returns:
        One match for each tensor of the whole run, in its order, the same on every rank.

    Comm:
        Two exchanges of control messages, and one all-reduce for each tensor that is a term.
    """
    mine = {k: _first_look(split[k], x, tolerance) for k, x in whole.items() if k in split}
    looks = exchange(mine, mesh)
    parts = exchange(_slices(whole, split, looks, mesh, tolerance, pieces), mesh)
    found: dict[Key, Match] = {}
    broken = False
    for key, x in whole.items():
        seen = [look[key] for look in looks if key in look]
        if len(seen) < len(looks):
            found[key] = Match("missing", numel=x.numel())
            continue
        shapes, gaps = [s[0] for s in seen], [s[1] for s in seen]
        scale = max(seen[0][2], floor)
        gap = max(gaps)
        if all(shape == tuple(x.shape) for shape in shapes):
            relation: Relation = "equal" if ratio(gap, scale) <= tolerance else "different"
            if relation == "different" and not broken:
                total = all_reduce(split[key].contiguous(), mesh)
                sums = exchange(gap_and_scale(total, x)[0], mesh)
                relation = "terms" if ratio(max(sums), scale) <= tolerance else "different"
            found[key] = Match(relation, gap, scale, x.numel())
        else:
            gaps = [part[key] for part in parts if part.get(key) is not None]
            worst = max(gaps, default=0.0)
            if len(gaps) < len(parts):
                found[key] = Match("unknown", 0.0, scale, x.numel())
            else:
                fits = ratio(worst, scale) <= tolerance
                relation = "slice" if fits else "different"
                found[key] = Match(relation, worst, scale, x.numel())
        broken = broken or found[key].relation == "different"
    return found


def _first_look(x: torch.Tensor, whole: torch.Tensor, tolerance: float) -> Any:
    if x.shape != whole.shape:
        return tuple(x.shape), float("inf"), gap_and_scale(whole, whole)[1]
    return (tuple(x.shape), *gap_and_scale(x, whole))


def _slices(
    whole: Mapping[Key, torch.Tensor],
    split: Mapping[Key, torch.Tensor],
    looks: Sequence[Mapping[Key, Any]],
    mesh: DeviceMesh,
    tolerance: float,
    pieces: Mapping[str, Sequence[Pieces]],
) -> dict[Key, float | None]:
    """Of tensors that are narrower than the whole: how far this rank's is from a slice of it."""
    rank = mesh.get_local_rank()
    found: dict[Key, float | None] = {}
    for key, x in whole.items():
        seen = [look[key] for look in looks if key in look]
        if len(seen) < len(looks) or all(s[0] == tuple(x.shape) for s in seen):
            continue
        dim = _cut_dim([s[0] for s in seen], tuple(x.shape))
        if dim is None:
            found[key] = None
            continue
        sizes = [s[0][dim] for s in seen]
        known = pieces.get(key.module) if key.side in ("out", "grad_out") else None
        gap = _nearest(split[key], x, dim, sizes, rank, known[rank] if known else ())
        shared = key.side.startswith("grad") and sum(sizes) > x.shape[dim]  # terms of a slice
        wide = gap_and_scale(x, x)[1] * tolerance
        found[key] = None if shared and gap > wide else gap
    return found


def _cut_dim(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """The one dim in which the shapes differ from the whole's, or None."""
    dims = set()
    for shape in shapes:
        if len(shape) != len(whole):
            return None
        dims |= {d for d, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b}
    return dims.pop() if len(dims) == 1 else None


def _nearest(
    x: torch.Tensor,
    whole: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    rank: int,
    known: Pieces,
) -> float:
    """How far `x` is from what this rank should have of the whole, for the likeliest reading.

    Pieces of a known layout; one stretch after another, in the order of the ranks; or any columns
    of the whole, as a fused or a padded layout takes them.
    """
    gaps = []
    if known and max(stop for _, stop in known) <= whole.shape[dim]:
        expected = torch.cat([whole.narrow(dim, a, b - a) for a, b in known], dim)
        if expected.shape == x.shape:
            gaps.append(gap_and_scale(x, expected)[0])
    if sum(sizes) == whole.shape[dim]:
        expected = whole.narrow(dim, sum(sizes[:rank]), sizes[rank])
        gaps.append(gap_and_scale(x, expected)[0])
    return min([*gaps, _columns(x, whole, dim)])


def _columns(x: torch.Tensor, whole: torch.Tensor, dim: int) -> float:
    """The largest distance of a column of `x` from the nearest one of `whole`, or from zero."""
    a = x.detach().to("cpu", torch.float64).movedim(dim, 0).flatten(1)
    b = whole.detach().to("cpu", torch.float64).movedim(dim, 0).flatten(1)
    if a.numel() == 0:
        return 0.0
    b = torch.cat([b, torch.zeros_like(b[:1])])  # what pads an uneven slice
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(a.shape[1], generator=draw, dtype=torch.float64)
    near = (b @ direction).sort()
    place = torch.searchsorted(near.values, a @ direction)
    best = torch.full((len(a),), float("inf"), dtype=torch.float64)
    for offset in range(-_CANDIDATES // 2, _CANDIDATES // 2):
        at = (place + offset).clamp(0, len(b) - 1)
        best = torch.minimum(best, (a - b[near.indices[at]]).abs().amax(1))
    return float(best.max())
