"""Styles of modules whose parameters every rank holds whole, and borders without parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait.comm import exchange, sum_from
from plait.styles.activations import as_dtensor
from plait.styles.head_params import PlacedParams
from plait.styles.layer import Args, Kwargs, TensorParallelLayer, first_input
from plait.styles.params import GradMode, replicate
from plait.styles.registry import ALL_PARALLEL_STYLES


class ReplicateParallel(TensorParallelLayer):
    """Every rank holds the parameters whole and computes the same output.

    Comm: none.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Make the parameter a DTensor that every rank holds whole."""
        replicate(module, param, mesh)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True


class ReplicatedWithGradAllReduce(ReplicateParallel):
    """Whole parameters used on a split input, so that each rank's gradient is one term of a sum.

    A norm on the local query heads (between a colwise and a rowwise layer) is the usual case.

    Comm:
        Backward one all-reduce for each parameter.
    """

    def param_grads(self, module: nn.Module) -> Mapping[str, GradMode]:
        """All are summed."""
        return dict.fromkeys(module._parameters, "sum")


class SequenceParallel(ReplicateParallel):
    """Whole parameters on an input that is split along the sequence.

    A plain input is this rank's shard of the sequence already (what a rowwise layer with
    `output_layouts=Shard(1)` leaves); a DTensor is brought to it. Each rank's gradient of a
    parameter is a term of a sum, since it saw its own tokens only.

    Args:
        sequence_dim: The dim of tokens, 1 in `[batch, sequence, hidden]`.
        use_local_output: Whether a plain tensor leaves (default) or a DTensor.

    Comm:
        Backward one all-reduce for each parameter. Forward, where a DTensor leaves: one control
        message, the number of tokens.

    Source: Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), section 4.2.2.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def param_grads(self, module: nn.Module) -> Mapping[str, GradMode]:
        """All are summed."""
        return dict.fromkeys(module._parameters, "sum")

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Bring this rank's tokens."""
        x, put = first_input(module, args, kwargs)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(self.sequence_dim)]).to_local()
        return put(x)

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Leave the tokens split."""
        if self.use_local_output or isinstance(output, DTensor):
            return output
        # Only the ranks together know the length of the whole sequence.
        shape = list(output.shape)
        shape[self.sequence_dim] = sum(exchange(shape[self.sequence_dim], mesh))
        return as_dtensor(output, mesh, Shard(self.sequence_dim), shape)


class AllReduceParallel(ReplicateParallel):
    """Sum a module's output over the axis: each rank's output is one term.

    Comm:
        Forward one all-reduce of the output (of the first tensor, where it is a tuple).
    """

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the terms."""
        if isinstance(output, tuple):
            return (self._sum(output[0], mesh), *output[1:])
        return self._sum(output, mesh)

    @staticmethod
    def _sum(x: torch.Tensor | None, mesh: DeviceMesh) -> torch.Tensor | None:
        if x is None:
            return None
        if isinstance(x, DTensor):
            placed = x.placements[0]
            x = x.to_local() if isinstance(placed, Partial | Replicate) else x.full_tensor()
            return sum_from(x, mesh) if isinstance(placed, Partial) else x
        return sum_from(x, mesh)


class LocalParamsParallel(TensorParallelLayer):
    """Run a module on the local part of bare parameters that rules of their own cut.

    Attention sinks are the usual case: `self_attn.sinks: colwise` cuts them with the heads, and
    `self_attn: local_params` makes the attention's forward see this rank's.

    Comm: none.
    """

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters; those with an entry for every head have one for every place."""
        return PlacedParams(module, self.grads_of(module))


ALL_PARALLEL_STYLES.register("replicate", ReplicateParallel())
ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", ReplicatedWithGradAllReduce())
ALL_PARALLEL_STYLES.register("sequence_parallel", SequenceParallel())
ALL_PARALLEL_STYLES.register("all_reduce", AllReduceParallel())
ALL_PARALLEL_STYLES.register("local_params", LocalParamsParallel())
