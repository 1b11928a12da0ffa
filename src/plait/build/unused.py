"""Parameters that only some data ranks use: experts, above all, to which the router sends no token.

FSDP reduces the gradients that a rank has. Where the ranks have gradients of different parameters
of a group, they would add up what does not belong together.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from plait import comm
from plait.run import torch_private

_LISTS = (nn.ModuleList, nn.ModuleDict)


_FIRST = 3
"""Backwards of a group in which the ranks compare, where a message costs time and nothing asks."""


def agree_on_unused(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Let a rank that has not used a parameter add a gradient of zeros, if another rank has one.

    Args:
        root: The model, after FSDP has sharded it.
        mesh: The data ranks.

    Comm: one all-reduce of a number for each parameter of a group, in each backward. Where the
        ranks do not talk through shared memory: for groups with lists of modules inside, for those
        in which ranks have differed, and else in the first three backwards.
    """
    if mesh is None or mesh.size() == 1:
        return
    linked = comm.is_linked(mesh)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            always = linked or _has_lists(part, is_root=part is root)
            torch_private.before_reducing(part, _Group(mesh, always).fill)


class _Group:
    """What one group knows of its parameters' use."""

    def __init__(self, mesh: DeviceMesh, always: bool) -> None:
        self.mesh, self.always, self.count = mesh, always, 0

    @torch.no_grad()
    def fill(self, params: list[torch_private.Unreduced]) -> None:
        """Add gradients of zeros where other ranks have one."""
        self.count += 1
        if not params or not (self.always or self.count <= _FIRST):
            return
        have = [float(param.has_gradient) for param in params]
        sent = torch.tensor(have, dtype=torch.float32, device=params[0].device)
        counts = comm.all_reduce(sent, self.mesh).tolist()
        self.always = self.always or any(count not in (0.0, self.mesh.size()) for count in counts)
        for param, mine, count in zip(params, have, counts, strict=True):
            if count and not mine:
                param.add_zeros()


def _has_lists(part: nn.Module, is_root: bool) -> bool:
    """Whether a group has lists of modules below it whose members are no groups themselves."""
    below: list[Any] = [child for child in part.children() if not isinstance(child, FSDPModule)]
    while below:
        child = below.pop()
        if isinstance(child, _LISTS) and any(
            not isinstance(m, FSDPModule) and any(True for _ in m.parameters())
            for m in child.children()
        ):
            return True
        below += [x for x in child.children() if not isinstance(x, FSDPModule)]
    return isinstance(part, _LISTS) and not is_root
