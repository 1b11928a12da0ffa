"""Where this process stands in a layout: which ranks see other samples, which see the same ones."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import build, comm
from plait import mesh as meshes
from plait.layout import AXES, ParallelismConfig, factors
from plait.layout.config import refuse_other
from plait.run import World, environment, process_group


@dataclass(frozen=True)
class Places:
    """This process among those of the run, as data loading and metrics see it.

    Attributes:
        world: Rank and number of processes.
        device: Where this rank computes.
        config: The layout that was asked for.
        mesh: All axes; None in one process.
        data_mesh: The ranks that see other samples than this one, as one axis, this rank included.
            None where there is only this one.
        tp_mesh: The ranks that see the same samples, likewise: those that share layers, and those
            that share sequences.
        sequences: The latter; None: nobody shares sequences.
        token_mesh: The ranks that see other tokens, of the same samples or others.
    """

    world: World
    device: torch.device
    config: ParallelismConfig
    mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    tp_mesh: DeviceMesh | None = None
    sequences: meshes.SequenceAxes | None = None
    token_mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """This rank's place among those that see other samples."""
        return 0 if self.data_mesh is None else self.data_mesh.get_local_rank()

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that see other samples."""
        return 1 if self.data_mesh is None else self.data_mesh.size()

    @property
    def layout(self) -> str:
        """The sizes in words."""
        if self.mesh is None:
            return "one process"
        mesh = self.mesh if self.sequences is None else self.sequences.mesh
        return factors(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))

    def exchange_grid(self, obj: Any) -> list[list[Any]]:
        """Every rank's object: for each place on the tensor-parallel axis those of the data axis.

        Comm: one control message on each axis.
        """
        row = [obj] if self.data_mesh is None else comm.exchange(obj, self.data_mesh)
        return [row] if self.tp_mesh is None else comm.exchange(row, self.tp_mesh)

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's object, that of the first rank first.

        Comm: one control message on each axis.
        """
        grid = self.exchange_grid(obj)
        return [cell for column in zip(*grid, strict=True) for cell in column]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, on all.

        Args:
            x: Of the same shape and dtype on every rank.

        Comm: one broadcast of `x` on each axis.
        """
        for mesh in (self.data_mesh, self.tp_mesh):
            x = x if mesh is None else comm.broadcast(x, mesh)
        return x


def places_for(config: ParallelismConfig | None = None) -> Places:
    """Join the processes of the run and find this one's place in a layout.

    Args:
        config: The sizes. None: those of the PARALLELISM_CONFIG_* environment variables. Where all
            of them are 1, every process is a data-parallel copy.

    Raises:
        LayoutError: The sizes do not fit the number of processes.

    Comm: joins the process group, and forms the groups of the mesh. All ranks must call.
    """
    refuse_other(config, "parallelism_config")
    config = ParallelismConfig.from_env() if config is None else config
    world = environment.world()
    device = process_group.ensure()
    sizes = [getattr(config, f"{axis}_size") or 1 for axis in AXES]
    derives_tp = config.tp_size is None and getattr(config, "tp_plan", None) is not None
    if world.world_size > 1 and math.prod(sizes) == 1 and config.ep_size == 1 and not derives_tp:
        config = dataclasses.replace(config, dp_replicate_size=world.world_size)
    return places_on(build.mesh_for(config), config, device)


def places_on(
    mesh: DeviceMesh | None,
    config: ParallelismConfig | None = None,
    device: torch.device | None = None,
) -> Places:
    """This process's place on a mesh.

    Args:
        mesh: With named axes, the tensor-parallel one named `tp`; None: one process.
        config: The sizes, for who wants to know them.
        device: Where this rank computes; None: the CPU, or the current device of the mesh's type.

    Comm: where several axes see different samples, their joint group is formed at the first call.
    """
    config = ParallelismConfig() if config is None else config
    if device is None:
        on_cuda = mesh is not None and mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device() if on_cuda else 0)
        device = device if on_cuda else torch.device("cpu")
    if mesh is None:
        return Places(environment.world(), device, config)
    names = mesh.mesh_dim_names or ()
    tp_mesh = meshes.axis(mesh, "tp") if "tp" in names else None
    others = tuple(name for name in names if name != "tp")
    token_mesh = data_mesh = meshes.flat(mesh, others) if others else None
    axes = build.sequence_axes_for(config, mesh)
    if axes is not None:
        data_mesh = axes.samples
        have = axes.mesh.mesh_dim_names or ()
        tp_mesh = meshes.flat(axes.mesh, [name for name in have if name in ("cp", "sp", "tp")])
    data_mesh, tp_mesh, token_mesh = map(_of_several, (data_mesh, tp_mesh, token_mesh))
    return Places(environment.world(), device, config, mesh, data_mesh, tp_mesh, axes, token_mesh)


def _of_several(mesh: DeviceMesh | None) -> DeviceMesh | None:
    return None if mesh is None or mesh.size() == 1 else mesh
