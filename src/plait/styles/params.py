"""A module's parameters as DTensors, and the plain local tensors that its forward sees."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from plait.comm import local
from plait.plan.intervals import even
from plait.styles.quantized import as_dtensor, is_quantized, keep_block, taken

GradMode = Literal["own", "sum"]
"""A rank's gradient of a parameter is its own (whole, or of its shard), or one term of a sum."""

ADDED = "_plait_added"
"""On a module: parameter name → a function of its local tensor, whose result the forward sees."""

CUTS = "_plait_cut"  # on a module: how its parameters are cut on the borders of heads


def place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace one parameter by a DTensor on `mesh`, cut from what this rank holds.

    Nothing is communicated: a parameter in memory must be the same on every rank, and each rank
    keeps its slice of it; one on the meta device becomes a placeholder that tells the reader which
    slice to read.

    Args:
        module: The module that holds the parameter.
        name: Its name there. A slot that holds None stays None.
        mesh: One axis.
        placement: Where it goes on that axis.
    """
    param = module._parameters.get(name)
    if param is None:
        return
    with torch.no_grad():
        if is_quantized(param):
            placed = _placed_quantized(param, mesh, placement)
        else:
            placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    set_param(module, name, placed, like=param)


def _placed_quantized(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return as_dtensor(x.detach(), mesh, placement, x)
    pieces = even(tuple(x.shape), placement.dim, mesh.size()).pieces[mesh.get_local_rank()]
    return as_dtensor(taken(x.detach(), placement.dim, pieces), mesh, placement, x)


def set_param(module: nn.Module, name: str, tensor: torch.Tensor, like: nn.Parameter) -> None:
    """Put `tensor` into a parameter slot with the attributes and `requires_grad` of `like`."""
    new = nn.Parameter(tensor, requires_grad=like.requires_grad)
    if is_quantized(like):  # its attributes are the whole numbers and scales
        keep_block(tensor, new)
    else:
        for key, value in vars(like).items():
            setattr(new, key, value)
    module._parameters[name] = new


def replicate(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Make one parameter a DTensor that every rank of `mesh` holds whole; shares its storage."""
    param = module._parameters.get(name)
    if param is None or isinstance(param, DTensor):
        return
    with torch.no_grad():
        if is_quantized(param):
            whole = as_dtensor(param.detach(), mesh, Replicate(), param)
        else:
            whole = DTensor.from_local(param.detach(), mesh, [Replicate()], run_check=False)
    set_param(module, name, whole, like=param)


def needed_param(module: nn.Module, name: str, x_owned: torch.Tensor) -> torch.Tensor:
    """What a rank's forward works on of one parameter, from the local tensor that it stores.

    Comm:
        As [`RankCut.needed`][plait.styles.heads.RankCut.needed].
    """
    cuts: dict[str, Any] | None = module.__dict__.get(CUTS)
    if cuts is None:
        return x_owned
    found = cuts.get(name, cuts.get(""))
    if found is None or name not in found.dims:
        return x_owned
    needed: torch.Tensor = found.needed(x_owned, found.dims[name], key=name)
    return needed


class LocalParams:
    """Context in which a module's DTensor parameters are plain local tensors.

    Gradients that arrive at the local tensors reach the DTensors with their own placements.

    Args:
        module: The module whose own parameters (not its children's) are exchanged.
        grads: Parameter name → gradient mode, for those that are not `"own"`.

    Comm:
        Backward: one all-reduce for each parameter whose mode is `"sum"`.
    """

    __slots__ = ("grads", "module", "params", "saved")

    def __init__(self, module: nn.Module, grads: Mapping[str, GradMode] | None = None) -> None:
        self.module = module
        self.params = module._parameters
        self.grads = grads
        self.saved: list[tuple[str, nn.Parameter]] = []

    def __enter__(self) -> None:
        params = self.params
        for name, param in params.items():
            if isinstance(param, DTensor):
                self.saved.append((name, param))
        for name, param in self.saved:
            params[name] = self.local(name, param)  # type: ignore[assignment]

    def local(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """What the forward sees of one parameter."""
        x = needed_param(self.module, name, local(param, self.mode(name)))
        added = self.module.__dict__.get(ADDED)
        return added[name](x) if added and name in added else x

    def mode(self, name: str) -> GradMode:
        """The gradient mode of a parameter."""
        return self.grads.get(name, "own") if self.grads else "own"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, param in self.saved:
            self.params[name] = param
        self.saved = []
