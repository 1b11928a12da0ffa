"""Parameters without a dimension, which FSDP cannot cut: whole on every data rank."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from plait.build.axes import data_axis
from plait.styles import ALL_PARALLEL_STYLES
from plait.styles.params import set_param
from plait.surgery.data_ranks import Averaging


def keep_whole(module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Keep a module's scalars on all data ranks; `average` does the rest once FSDP is there.

    Args:
        module: The module, after tensor parallelism, before FSDP.
        mesh: All axes.

    Returns:
        The scalars in the order of the modules, which is that of every rank: DTensors on the same
        mesh as the parameters that FSDP cuts, so that norms and optimizers meet one kind of
        parameter.

    Comm: none.
    """
    found: dict[nn.Parameter, nn.Parameter] = {}  # what was there → what is
    tp_mesh = mesh["tp"]
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is None or param.ndim > 0:
                continue
            if param in found:  # shared by several modules
                part._parameters[name] = found[param]
            else:
                found[param] = _whole(part, name, mesh)
            if "_plait_border" not in part.__dict__:
                ALL_PARALLEL_STYLES["replicate"].install_forward(part, tp_mesh)
    return list(found.values())


def average(module: nn.Module, scalars: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of scalars over the data ranks in every backward.

    Args:
        module: The module, after FSDP has sharded it.
        scalars: What `keep_whole` returned.
        mesh: All axes.

    Comm: one all-reduce for all of them at the end of each backward.
    """
    data = data_axis(mesh)
    if data is not None and scalars:
        Averaging(module, data).keep(scalars)


def _whole(part: nn.Module, name: str, mesh: DeviceMesh) -> nn.Parameter:
    param = part._parameters[name]
    assert param is not None
    local = param._local_tensor if isinstance(param, DTensor) else param.detach()
    whole = mesh if mesh["tp"].size() > 1 else _without_tp(mesh)
    placed = DTensor.from_local(local, whole, [Replicate()] * whole.ndim, run_check=False)
    set_param(part, name, placed, like=param)
    new = part._parameters[name]
    assert new is not None
    return new


def _without_tp(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names if len(names) > 1 else names[0]]
