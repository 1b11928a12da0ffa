"""Who writes what: every whole tensor is cut into boxes, each given to one rank that holds it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a whole tensor: where it starts, and its sizes."""


def volume(box: Box) -> int:
    """The number of elements."""
    return math.prod(box[1])


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def without(box: Box, taken: Box) -> list[Box]:
    """What is left of a box where another has taken its share: at most two boxes for each dim."""
    shared = common(box, taken)
    if shared is None:
        return [box]
    left = []
    starts, sizes = list(box[0]), list(box[1])
    for dim, (a, n) in enumerate(zip(*shared, strict=True)):
        end = starts[dim] + sizes[dim]
        for low, high in ((starts[dim], a), (a + n, end)):
            if low < high:
                left.append(
                    (
                        (*starts[:dim], low, *starts[dim + 1 :]),
                        (*sizes[:dim], high - low, *sizes[dim + 1 :]),
                    )
                )
        starts[dim], sizes[dim] = a, n
    return left


@dataclass(frozen=True)
class Whole:
    """A tensor of the checkpoint, as all ranks know it.

    Attributes:
        name: The parameter whose place on the ranks it shares.
        shape: Of the whole.
        itemsize: Bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.itemsize


def shares(
    asked: str, tensors: Mapping[str, Whole], held: Sequence[Mapping[str, Sequence[Box]]]
) -> list[dict[str, list[Box]]]:
    """Gives every element of every tensor to one of the ranks that hold it, as evenly as may be.

    The same on every rank: nothing but the arguments decides.

    Args:
        asked: For the message.
        tensors: The tensors of the checkpoint by their keys.
        held: For each rank the boxes of each parameter that it holds.

    Returns:
        For each rank the boxes of each tensor that it writes.

    Raises:
        CheckpointError: Some part of a tensor is on no rank.
    """
    cut: dict[str, list[tuple[Box, list[int]]]] = {}
    problems = []
    for whole in tensors.values():
        if whole.name not in cut:
            cut[whole.name] = list(_disjoint(whole.name, held))
            missing = math.prod(whole.shape) - sum(volume(box) for box, _ in cut[whole.name])
            if missing:
                problems.append(f"{whole.name}: {missing} elements are on no rank")
    if problems:
        raise CheckpointError(asked, problems)
    jobs = [
        (volume(box) * whole.itemsize, key, box, ranks)
        for key, whole in tensors.items()
        for box, ranks in cut[whole.name]
    ]
    load = [0] * len(held)
    given: list[dict[str, list[Box]]] = [{} for _ in held]
    for nbytes, key, box, ranks in sorted(jobs, key=lambda job: (-job[0], job[1], job[2])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += nbytes
        given[rank].setdefault(key, []).append(box)
    return given


def _disjoint(
    name: str, held: Sequence[Mapping[str, Sequence[Box]]]
) -> Iterable[tuple[Box, list[int]]]:
    """The boxes of one parameter with the ranks that hold them; none overlap another."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes.get(name, ()):
            ranks = holders.setdefault(box, [])
            if rank not in ranks:  # one rank may hold a head twice
                ranks.append(rank)
    done: list[Box] = []
    # Heads that ranks share overlap in part; elsewhere boxes are equal or apart.
    for box, ranks in holders.items():
        left = [box]
        for other in done:
            left = [part for one in left for part in without(one, other)]
        done += left
        yield from ((part, ranks) for part in left)
