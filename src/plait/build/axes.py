"""The axes of a mesh along which the ranks see different samples."""

from torch.distributed.device_mesh import DeviceMesh

from plait import mesh as meshes
from plait.errors import LayoutError

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks see different samples."""


def data_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """All ranks that see different samples, as one axis; None where there is only one.

    Comm: forms the joined group where there are two axes. All ranks must call.
    """
    names = [name for name in mesh.mesh_dim_names or () if name in DATA_AXES]
    axis = meshes.flat(mesh, names) if names else None
    return axis if axis is not None and axis.size() > 1 else None


def fsdp_axes(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh for `fully_shard`: shards, or copies × shards; None without data parallelism."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in DATA_AXES)
    if not names or all(mesh[name].size() == 1 for name in names):
        return None
    return mesh if names == mesh.mesh_dim_names else mesh[names if len(names) > 1 else names[0]]


def shard_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis over which parameters are cut once more; None where there is none."""
    if "dp_shard" not in (mesh.mesh_dim_names or ()) or fsdp_axes(mesh) is None:
        return None
    return meshes.axis(mesh, "dp_shard")


def tp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The tensor-parallel axis of `mesh`: the one named `tp`, or its only one.

    Raises:
        LayoutError: There are several and none has the name, or the only one is a data axis.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return meshes.axis(mesh, "tp") if mesh.ndim > 1 else mesh
    if mesh.ndim == 1 and not set(names) & set(DATA_AXES):
        return mesh
    raise LayoutError(
        f"device_mesh with the axes {names or mesh.shape}:",
        "none of them is named 'tp'",
        [
            "name it: init_device_mesh(…, mesh_dim_names=(…, 'tp')), of size 1 if need be",
            "pass mesh['your_axis']",
            "leave device_mesh out: the mesh is made from the config",
        ],
    )
