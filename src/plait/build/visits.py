"""Do all data ranks run the same groups of a sharded model, in the same order?

FSDP gathers a group's parameters from all data ranks when its forward begins. Ranks that take
different paths (experts chosen by the data, layers that are left out at random) would gather
different groups from each other: numbers of the wrong size, or of the right size and wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from plait import comm
from plait.errors import RankError
from plait.loss.asking import ALONE
from plait.run import torch_private

_VISITS = "_plait_visits"
_FIRST = 3
"""Forwards that are compared where the ranks do not talk through shared memory."""


class Visits:
    """The groups that the forward that runs has begun.

    Where ranks talk through shared memory they compare before each group, and else the whole list
    at the end of the first forwards.

    Args:
        root: The model.
        mesh: The data ranks.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.every = comm.is_linked(mesh)
        self.names = [n for n, m in root.named_modules() if n and isinstance(m, FSDPModule)]
        self.seen: list[int] = []
        self.is_open = False
        self.ended = 0

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self.seen, self.is_open = [], True

    def visit(self, number: int) -> None:
        """A group's forward begins.

        Raises:
            RankError: Another data rank begins another group, or has ended its forward.

        Comm: one control message over the data ranks, where they talk through shared memory.
        """
        if not self.is_open or torch_private.in_backward():
            return
        self.seen.append(number)
        if self.every:
            self._compare([number])

    def end(self) -> None:
        """The forward has ended; as `visit`."""
        self.is_open = False
        if self.every:
            self._compare([-1])
        elif self.ended < _FIRST:
            self._compare([*self.seen, -1])
        self.ended += 1

    def _compare(self, mine: list[int]) -> None:
        told = comm.exchange(mine, self.mesh)
        if all(other == told[0] for other in told):
            return
        place = next(i for i in range(len(mine) + 1) if len({tuple(t[: i + 1]) for t in told}) > 1)
        error = RankError(
            "A forward of a model that is sharded over data ranks:",
            [f"data rank {rank} {self._at(other, place)}" for rank, other in enumerate(told)],
            [
                "let all data ranks take the same path: seed what is left out at random alike",
                "fsdp_plan={'experts.*': 'root'}, with their name: gathered with what is around "
                "them, each rank uses those that it needs",
                "tp_size alone: its ranks see the same samples",
            ],
        )
        raise comm.mark_announced(error)

    def _at(self, visited: list[int], place: int) -> str:
        number = visited[place] if place < len(visited) else -1
        return "is at its end" if number < 0 else f"begins {self.names[number]}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Visits":
        return self


def watch_visits(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Compare the paths of the data ranks through a model.

    Args:
        root: The model, after FSDP has sharded it.
        mesh: The data ranks.
    """
    if mesh is None or mesh.size() == 1:
        return
    visits = root.__dict__[_VISITS] = Visits(root, mesh)
    named = dict(root.named_modules())
    for number, name in enumerate(visits.names):
        # Before FSDP's own, which gathers.
        named[name].register_forward_pre_hook(partial(_visit, visits, number), prepend=True)


@contextmanager
def same_path(root: nn.Module) -> Iterator[None]:
    """Around one forward of a whole model: all data ranks run the same groups.

    Raises:
        RankError: They do not.

    Comm: control messages over the data ranks, of a sharded model.
    """
    visits: Visits | None = root.__dict__.get(_VISITS)
    if visits is None or root.__dict__.get(ALONE) or torch.compiler.is_compiling():
        yield
        return
    visits.begin()
    try:
        yield
        visits.end()
    finally:
        visits.is_open = False


def _visit(visits: Visits, number: int, module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        visits.visit(number)
