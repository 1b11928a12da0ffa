"""Parameters without a dimension, which FSDP cannot cut: whole on every data rank."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from plait import comm
from plait.build.axes import data_axis
from plait.styles import ALL_PARALLEL_STYLES
from plait.styles.params import set_param


def reduce_alone(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Keep a module's scalars on all data ranks and average their gradients in the backward.

    Args:
        module: The module, after tensor parallelism, before FSDP.
        mesh: All axes.

    Returns:
        The scalars, DTensors on the same mesh as the parameters that FSDP cuts, so that norms and
        optimizers meet one kind of parameter.

    Comm: one all-reduce of one number for each in the backward.
    """
    found: set[nn.Parameter] = set()
    data = data_axis(mesh)
    tp_mesh = mesh["tp"]
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is None or param.ndim > 0:
                continue
            local = param._local_tensor if isinstance(param, DTensor) else param.detach()
            whole = mesh if tp_mesh.size() > 1 else _without_tp(mesh)
            placed = DTensor.from_local(local, whole, [Replicate()] * whole.ndim, run_check=False)
            set_param(part, name, placed, like=param)
            new = part._parameters[name]
            assert new is not None
            if data is not None and new.requires_grad:
                new.register_post_accumulate_grad_hook(_Mean(data))
            if "_plait_border" not in part.__dict__:
                ALL_PARALLEL_STYLES["replicate"].install_forward(part, tp_mesh)
            found.add(new)
    return found


def _without_tp(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names if len(names) > 1 else names[0]]


class _Mean:
    """Averages a gradient over the data ranks; what was averaged before stays what it is."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, param: torch.Tensor) -> None:
        grad: Any = param.grad
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        local.copy_(comm.all_reduce(local, self.mesh) / self.mesh.size())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Mean":
        return self
