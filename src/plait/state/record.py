"""What plait remembers about a module it has split."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from plait.layout import DistributedConfig, ParallelismConfig
from plait.mesh import SequenceAxes
from plait.plan import Plan
from plait.plan.intervals import ParamLayout
from plait.run.around import place_of_split

STATE = "_plait"
LAYOUT = "_plait_layout"  # on a parameter whose placement does not say where its pieces belong


@dataclass(frozen=True)
class ParallelState:
    """How one module was split; found with [`state_of`][plait.state.record.state_of].

    Attributes:
        mesh: The mesh of all axes.
        tp_mesh: Its tensor-parallel axis.
        plan: Every decision that was applied.
        layouts: Parameter name → which index ranges each rank of the tensor-parallel axis holds.
        config: The config it was split with.
        fsdp_mesh: The axis over which each rank's part of the parameters is cut once more (FSDP),
            or None.
        data_mesh: All ranks with the same place on the tensor-parallel axis, as one axis: those
            that see different tokens. None where there is only one.
        sequences: The ranks that share sequences, each with some of their tokens; None: none do.
    """

    mesh: DeviceMesh
    tp_mesh: DeviceMesh
    plan: Plan
    layouts: Mapping[str, ParamLayout]
    config: ParallelismConfig | DistributedConfig
    fsdp_mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    sequences: SequenceAxes | None = None

    @property
    def tp_size(self) -> int:
        """Number of ranks on the tensor-parallel axis."""
        return self.tp_mesh.size()

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that see different samples."""
        return 1 if self.data_mesh is None else self.data_mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelState":
        return self  # nothing in it changes, and a mesh cannot be copied


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it: FSDP puts one of its own before it."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def state_of(module: nn.Module) -> ParallelState | None:
    """The state that `parallelize` left on `module`, or None where it was not split.

    Of a model of PEFT around a split one it is that of the split one, with the names in `module`.
    """
    state: ParallelState | None = module.__dict__.get(STATE)
    around = place_of_split(module) if state is None else ""
    if around:
        inside = state_of(module.get_submodule(around))
        if inside is not None:
            layouts = {f"{around}.{name}": layout for name, layout in inside.layouts.items()}
            return replace(inside, layouts=layouts)
    return state
