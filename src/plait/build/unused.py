"""Parameters that only some data ranks use: experts, above all, to which the router sends no token.

FSDP reduces the gradients that a rank has. Where the ranks have gradients of different parameters
of a group, they would add up what does not belong together.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait import comm
from plait.run import torch_private

_LISTS = (nn.ModuleList, nn.ModuleDict)


def agree_on_unused(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Let a rank that has not used a parameter add a gradient of zeros, if another rank has one.

    For the groups of FSDP inside which there are lists of modules; what is not in a list is taken
    to be used by all ranks or none.

    Args:
        root: The model, after FSDP has sharded it.
        mesh: The data ranks.

    Comm: one all-reduce of a number for each parameter of such a group, in each backward.
    """
    if mesh is None or mesh.size() == 1:
        return
    for part in root.modules():
        if isinstance(part, FSDPModule) and _has_lists(part, is_root=part is root):
            torch_private.before_reducing(part, partial(_fill, mesh))


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


@torch.no_grad()
def _fill(mesh: DeviceMesh, params: list[nn.Parameter]) -> None:
    trained = [param for param in params if param.requires_grad]
    if not trained:
        return
    like: Any = trained[0]
    local = like._local_tensor if isinstance(like, DTensor) else like
    have = [float(param.grad is not None) for param in trained]
    counts = comm.all_reduce(torch.tensor(have, dtype=torch.float32, device=local.device), mesh)
    for param, mine, count in zip(trained, have, counts.tolist(), strict=True):
        if count and not mine:
            param.grad = torch.zeros_like(param)
