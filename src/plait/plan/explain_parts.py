"""The records of an explained plan: parameters, modules, collectives, and how they are added up."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from plait.plan.heads import Attention

KINDS = ("embedding", "attention", "MLP", "experts", "norms", "head", "other")
"""What the parameters of a model are for, in the order in which they are shown."""

Shape = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Param:
    """One parameter.

    Attributes:
        name: Its name in its module.
        shape: Shape of the whole.
        local: Shape on each rank.
        itemsize: Bytes of one element.
        style: The style of a rule that names this parameter alone, or `""`.
        tied: The parameter that it is the same as, where that one is counted, or `""`.
    """

    name: str
    shape: Shape
    local: tuple[Shape, ...]
    itemsize: int
    style: str = ""
    tied: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether some rank holds less than the whole."""
        return any(shape != self.shape for shape in self.local)

    @property
    def bytes(self) -> int:
        """Bytes of the whole; 0 for one that is counted elsewhere."""
        return 0 if self.tied else math.prod(self.shape) * self.itemsize

    @property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes on each rank."""
        return tuple(0 if self.tied else math.prod(s) * self.itemsize for s in self.local)


@dataclass(frozen=True)
class Part:
    """One module that holds parameters, or that a rule names.

    Attributes:
        name: Its name.
        module: The name of its class.
        kind: One of `KINDS`.
        style: Its style, or `""` where no rule names it.
        origin: Where the rule comes from: model, user, derived or tied; or `""`.
        params: Its own parameters.
        why: Why it is whole on every rank; `""` where something of it is cut.
    """

    name: str
    module: str
    kind: str
    style: str
    origin: str
    params: tuple[Param, ...]
    why: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return sum(p.bytes for p in self.params)

    @property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes on each rank; empty where it has no parameters."""
        return tuple(map(sum, zip(*(p.local_bytes for p in self.params), strict=True)))

    @property
    def is_cut(self) -> bool:
        """Whether some rank holds less than the whole of it."""
        return any(p.is_cut for p in self.params)


@dataclass(frozen=True)
class Call:
    """One collective of a training step.

    Attributes:
        modules: The modules that cause it; several share one.
        phase: `"forward"` or `"backward"`.
        collective: As `plait.comm.count` names it: all_reduce, all_gather, reduce_scatter.
        bytes: Bytes of the whole tensor.
        what: What is communicated, in words.
    """

    modules: tuple[str, ...]
    phase: Literal["forward", "backward"]
    collective: str
    bytes: int
    what: str


def block_of(name: str) -> tuple[str, int | None]:
    """The list of layers that a module is in, and its layer's number; or its name and None.

    >>> block_of("model.layers.3.mlp.up_proj")
    ('model.layers', 3)
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() and at:
            return ".".join(parts[:at]), int(part)
    return name, None


def spans(numbers: Iterable[int]) -> str:
    """Numbers as stretches.

    >>> spans([0, 1, 2, 5])
    '0-2,5'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def local_by_kind(parts: Iterable[Part]) -> dict[str, list[int]]:
    """Kind → bytes on each rank."""
    groups: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
    for part in parts:
        if part.params:
            groups[part.kind].append(part.local_bytes)
    return {kind: sums(found, len(found[0])) for kind, found in groups.items() if found}


def tally(calls: Iterable[Call], phase: str = "") -> dict[str, tuple[int, int]]:
    """Collective → calls and bytes."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls:
        if phase in ("", call.phase):
            number, total = found.get(call.collective, (0, 0))
            found[call.collective] = number + 1, total + call.bytes
    return found


def shared_heads(attention: Attention) -> tuple[int, ...]:
    """Key/value heads that several ranks need."""
    every = [head for heads in attention.heads.kv for head in heads]
    return tuple(sorted({head for head in every if every.count(head) > 1}))


def padded_places(attention: Attention) -> tuple[int, ...]:
    """Per rank, how many places compute a query head that the rank has already."""
    heads = attention.heads
    return tuple(len(heads.places(rank)) - len(query) for rank, query in enumerate(heads.query))


def sums(rows: Iterable[tuple[int, ...]], num_ranks: int) -> list[int]:
    """Totals for each rank."""
    totals = [0] * num_ranks
    for row in rows:
        for rank, value in enumerate(row):
            totals[rank] += value
    return totals


def grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Items with equal keys, in the order of the first of each."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def in_blocks(
    items: Iterable[_T], name: Callable[[_T], str]
) -> dict[tuple[str, int | None], list[_T]]:
    """Items by the layer that their name lies in."""
    found: dict[tuple[str, int | None], list[_T]] = {}
    for item in items:
        found.setdefault(block_of(name(item)), []).append(item)
    return found
