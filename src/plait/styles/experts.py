"""Mixture-of-experts layers: tensor-parallel experts, and the styles that are not built yet."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import copy_to, sum_from
from plait.errors import PlanError
from plait.styles.layer import Args, Kwargs, TensorParallelLayer, first_input
from plait.styles.registry import ALL_PARALLEL_STYLES


class MoeExpertsParallel(TensorParallelLayer):
    """Every rank holds a slice of the width of every expert; the outputs are summed.

    The experts' stacked weights are cut by rules of their own (`packed_colwise` for
    `gate_up_proj`, `rowwise` for `down_proj`). The forward takes the hidden states and then,
    in any order, the routing: integer indices are whole on every rank, floating weights get the sum
    of all ranks' gradients.

    Comm:
        Forward one all-reduce of the output. Backward one all-reduce of the hidden states and one
        of the routing weights.
    """

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse experts that add a bias after the width is summed: every rank would add it."""
        late = [n for n, p in module._parameters.items() if p is not None and _is_late_bias(n)]
        if late:
            raise PlanError(
                f"Style 'moe_tp_experts' on {name!r}:",
                f"{', '.join(late)} would be added once on each of the {mesh.size()} ranks",
                ["tp_size=1 until such experts are supported"],
            )

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: the experts run on their slices."""
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Hand hidden states and routing weights to the slices."""

        def hand(x: Any) -> Any:
            return copy_to(x, mesh) if isinstance(x, torch.Tensor) and x.requires_grad else x

        return tuple(hand(x) for x in args), {name: hand(x) for name, x in kwargs.items()}

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the slices' outputs."""
        if isinstance(output, tuple):
            return (sum_from(output[0], mesh), *output[1:])
        return sum_from(output, mesh)


class MoeIdentityParallel(TensorParallelLayer):
    """An expert that returns its input, inside experts whose outputs are summed.

    Every rank would return the same value, so the input is divided by their number first.

    Comm: none.
    """

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Divide by the number of ranks."""
        x, put = first_input(module, args, kwargs)
        return put(x / mesh.size())


class NotBuilt(TensorParallelLayer):
    """A style whose name is known and whose feature is not built yet: refused by name.

    Args:
        feature: What it belongs to.
    """

    def __init__(self, feature: str) -> None:
        self.feature = feature

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse."""
        self._refuse(name)

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse."""
        self._refuse(parameter_name or param)

    def _refuse(self, name: str) -> None:
        raise PlanError(
            f"The style of {name!r}:",
            f"{self.feature} is not built yet",
            "give the module and its parameters the style 'replicate'",
        )


def _is_late_bias(name: str) -> bool:
    return "bias" in name and "down" in name


ALL_PARALLEL_STYLES.register("moe_tp_experts", MoeExpertsParallel())
ALL_PARALLEL_STYLES.register("moe_identity_expert", MoeIdentityParallel())
for _name, _feature in {
    "grouped_gemm": "expert parallelism",
    "ep_router": "expert parallelism",
    "ep_dispatch_experts": "expert parallelism",
}.items():
    ALL_PARALLEL_STYLES.register(_name, NotBuilt(_feature))
