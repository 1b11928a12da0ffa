"""Parameters that came after FSDP had cut the others: whole on every data rank, gradients averaged.

FSDP keeps account of the parameters that a module has when it is sharded. What is put in later,
adapters above all, is small: every data rank holds its tensor-parallel part whole, and the
gradients of all of them are averaged together at the end of the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from plait import comm
from plait.plan.intervals import ParamLayout
from plait.run import torch_private
from plait.state import LAYOUT, ParallelState
from plait.styles.params import set_param
from plait.weights.sharded import fsdp_shards, without_fsdp
from plait.weights.slots import layout_of_tensor

_AVERAGING = "_plait_averaging"  # on a root


def spread_over_data(part: nn.Module, name: str, state: ParallelState) -> None:
    """Make a parameter, cut by tensor parallelism alone, one that all data ranks hold alike.

    Args:
        part: The module that holds it.
        name: Its name there.
        state: How the whole was split; without data ranks nothing is done.

    Comm: none.
    """
    param = part._parameters.get(name)
    if state.data_mesh is None or not isinstance(param, DTensor):
        return
    layout = param.__dict__.get(LAYOUT) or layout_of_tensor(name, param)
    mesh = state.mesh if state.tp_size > 1 else _data_axes(state.mesh)
    on_tp = param.placements if state.tp_size > 1 else ()
    copies = [Replicate()] * (mesh.ndim - len(on_tp))
    with torch.no_grad():
        placed = DTensor.from_local(
            param._local_tensor,
            mesh,
            [*copies, *on_tp],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    set_param(part, name, placed, like=param)
    new = part._parameters[name]
    assert new is not None
    new.__dict__[LAYOUT] = layout


def _data_axes(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names if len(names) > 1 else names[0]]


def average_over_data(
    params: Sequence[nn.Parameter], root: nn.Module, state: ParallelState
) -> None:
    """Average the gradients of parameters over the data ranks, whenever they get one.

    Args:
        params: Parameters that every data rank holds alike; those named before and left out now
            are no longer looked after.
        root: The whole model.
        state: How it was split.
    """
    assert state.data_mesh is not None
    if _AVERAGING not in root.__dict__:
        root.__dict__[_AVERAGING] = Averaging(root, state.data_mesh)
    found: Averaging = root.__dict__[_AVERAGING]
    found.keep(params)


class Averaging:
    """Averages gradients over the data ranks at the end of each backward pass that reduces others.

    FSDP tells of such a pass on every rank, whether or not it uses these parameters.

    Args:
        root: The model, after FSDP has sharded it.
        mesh: The data ranks.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.params: list[nn.Parameter] = []
        self._asked = -1  # in which backward
        for part in root.modules():
            if isinstance(part, FSDPModule):
                torch_private.before_reducing(part, self._note)

    def keep(self, params: Sequence[nn.Parameter]) -> None:
        """Average the gradients of these parameters, whether they are trained now or later."""
        self.params = list(params)

    def _note(self, reduced: Any) -> None:
        backward = torch_private.backward_id()
        if self.params and self._asked != backward:
            self._asked = backward
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Average the gradients of all trained parameters; one that no rank has stays None.

        Comm:
            One all-reduce for each dtype.
        """
        self._asked = -1
        trained = [param for param in self.params if param.requires_grad]
        for dtype in sorted({p.dtype for p in trained}, key=str):
            self._average_of([p for p in trained if p.dtype == dtype])

    @torch.no_grad()
    def _average_of(self, params: list[nn.Parameter]) -> None:
        found = [_local(param.grad) for param in params]
        shapes = [_local(param) for param in params]
        parts = [
            (torch.zeros_like(like) if grad is None else grad).reshape(-1)
            for grad, like in zip(found, shapes, strict=True)
        ]
        have = shapes[0].new_tensor([float(grad is not None) for grad in found])
        sums = comm.all_reduce(torch.cat([*parts, have]), self.mesh)
        *means, have = sums.split([*(p.numel() for p in parts), len(parts)])
        for param, grad, mean, count in zip(params, found, means, have.tolist(), strict=True):
            if grad is not None:
                grad.copy_((mean / self.mesh.size()).view(grad.shape))
            elif count:
                param.grad = _placed(param, mean / self.mesh.size())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Averaging":
        return self


def _local(x: torch.Tensor | None) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _placed(param: nn.Parameter, mean: torch.Tensor) -> torch.Tensor:
    local = mean.view(_local(param).shape).clone()
    return DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local


def without_chunks(param: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """The tensor-parallel part of a parameter of which FSDP has left a chunk.

    Comm:
        One all-gather over the data axis, where it is cut.
    """
    return without_fsdp(param, layout) if fsdp_shards(param) is not None else _local(param)
