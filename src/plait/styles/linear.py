"""Column- and row-parallel linear layers.

A pair of them needs two collectives: the first multiplies a whole input by its columns of the
weight, the second multiplies the split result by its rows and sums.

| layer | weight `[out, in]` | bias | input arrives | output leaves |
|---|---|---|---|---|
| `colwise` | `Shard(0)` | `Shard(0)` | whole | split on the last dim |
| `colwise_gather_output` | `Shard(0)` | `Shard(0)` | whole | whole |
| `rowwise` | `Shard(1)` | whole | split on the last dim | whole |
| `rowwise_split_input` | `Shard(1)` | whole | whole | whole |

The weight of a `Conv1D` of transformers is `[in, out]`, and its dims change places. Features that
are heads of an attention are cut on head borders ([`heads`][plait.styles.heads]).

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3:
Y = GeLU(X [A₁ A₂]), Z = Y₁ B₁ + Y₂ B₂.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plait.comm import local, scatter_sum, split_to, sum_from
from plait.errors import PlanError
from plait.loss.asking import asked_of, split_output
from plait.plan.intervals import ParamLayout
from plait.styles import linear_forwards as forwards
from plait.styles.activations import as_dtensor, leave_split_features, to_replicate
from plait.styles.heads import (
    cut_layout,
    cut_of,
    own_features,
    place_features,
    place_scales,
    rearranged,
    scales_layout,
)
from plait.styles.layer import (
    Args,
    Kwargs,
    TensorParallelLayer,
    bind_forward,
    first_input,
    hooks_are,
)
from plait.styles.linear_kinds import (
    features,
    in_dim,
    is_linear,
    is_plain,
    out_dim,
    slices,
    validate_dims,
    validate_linear,
)
from plait.styles.params import LocalParams, place
from plait.styles.quantized import SCALES, has_block_scales, refuse_cut_blocks
from plait.styles.registry import ALL_PARALLEL_STYLES


class ColwiseParallel(TensorParallelLayer):
    """Each rank computes its slice of the output features.

    Parameters: a weight of two or more dims is `Shard(-2)` (output features), a 1-D one `Shard(0)`.

    Args:
        input_layouts: How the input arrives: `Replicate()` (default), `Shard(d)` (gathered first),
            `Partial()` (summed first).
        output_layouts: How the output leaves: `Shard(-1)` (default) stays as it is computed,
            `Replicate()` is gathered, any other `Shard(d)` is gathered and cut again.
        use_local_output: Whether a plain tensor leaves (default) or a DTensor.

    Comm:
        Input `Replicate()`: backward, one all-reduce of the input, shared by all modules that take
        the same tensor. Input `Shard(d)`: forward all-gather, backward reduce-scatter. Output
        `Replicate()`: forward one all-gather of the output, backward nothing.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse a module that is no linear layer."""
        validate_linear(module, "colwise", name)

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of output features."""
        validate_dims(module, param, parameter_name, "colwise")
        tensor = module._parameters.get(param)
        if tensor is not None and tensor.ndim > 1:
            layout, dim = self.param_layout(module, param, mesh), out_dim(module, tensor)
            refuse_cut_blocks(module, param, layout, dim, mesh, parameter_name or param)

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The features of the rank's own heads, where they are no ordinary shard."""
        tensor = module._parameters.get(param)
        if tensor is None:
            return None
        if param == SCALES:
            return scales_layout(module, 0, mesh)
        return cut_layout(module, param, out_dim(module, tensor), mesh)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the output features."""
        tensor = module._parameters.get(param)
        if tensor is None:
            return
        if has_block_scales(module) and (param == SCALES or tensor.ndim == 0):
            place_scales(module, param, mesh, self.param_layout(module, param, mesh))
        else:
            place_features(module, param, mesh, out_dim(module, tensor))

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: the matmul runs on local tensors."""
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Bring the input to every rank whole."""
        x, put = first_input(module, args, kwargs)
        return put(to_replicate(x, self.input_layouts, mesh))

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Gather the output features, or leave them split."""
        cut = cut_of(module)
        if cut is not None and cut.places is not None:
            output = rearranged(output, -1, cut.places)
        out_features, asked = features(module)[0], asked_of(module)
        if asked is not None and self.use_local_output and self.output_layouts == Replicate():
            return split_output(output, slices(module, output, mesh), mesh, asked)
        return leave_split_features(
            output, out_features, self.output_layouts, self.use_local_output, mesh
        )

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the border around the forward; a plain `nn.Linear` gets one fused function."""
        simple = isinstance(self.input_layouts, Replicate) and self.use_local_output
        if simple and hooks_are(self, ColwiseParallel) and is_plain(module):
            cut = cut_of(module)
            even = cut is None or not (cut.cut.is_shared or cut.cut.is_padded)
            if self.output_layouts == Shard(-1):
                fused = even and is_linear(module)
                return bind_forward(
                    module, self, mesh, forwards.colwise if fused else forwards.colwise_heads
                )
            if isinstance(self.output_layouts, Replicate):
                return bind_forward(module, self, mesh, forwards.colwise_gather)
        return super().install_forward(module, mesh)


class RowwiseParallel(TensorParallelLayer):
    """Each rank multiplies its slice of the input features; the products are summed.

    Parameters: the weight is `Shard(-1)` (input features); the bias is whole on every rank and
    added once, after the sum.

    Args:
        input_layouts: How the input arrives: `Shard(-1)` (default) or `Replicate()` (sliced).
        output_layouts: How the output leaves: `Replicate()` (default) is an all-reduce, `Shard(d)`
            a reduce-scatter, `Partial()` leaves the terms unsummed (then without the bias).
        use_local_output: Whether a plain tensor leaves (default) or a DTensor.

    Comm:
        Forward one all-reduce (or reduce-scatter) of the output. Backward nothing for an input that
        arrives split; one all-gather of the input's gradient for one that arrives whole.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts or Shard(-1)
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output
        if not isinstance(self.input_layouts, Replicate) and self.input_layouts != Shard(-1):
            raise PlanError(
                f"RowwiseParallel(input_layouts={self.input_layouts}):",
                "each rank multiplies its slice of the input features",
                ["Shard(-1): the input arrives split", "Replicate(): each rank takes its slice"],
            )

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse a module that is no linear layer."""
        validate_linear(module, "rowwise", name)

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of input features."""
        validate_dims(module, param, parameter_name, "rowwise")
        tensor = module._parameters.get(param)
        if tensor is not None and tensor.ndim > 1:
            layout, dim = self.param_layout(module, param, mesh), in_dim(module, tensor)
            refuse_cut_blocks(module, param, layout, dim, mesh, parameter_name or param)

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The features of the rank's own heads, where they are no ordinary shard."""
        tensor = module._parameters.get(param)
        if tensor is None or tensor.ndim < 2:
            return None
        if param == SCALES:
            return scales_layout(module, 1, mesh)
        return cut_layout(module, param, in_dim(module, tensor), mesh)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the input features; leave the bias whole."""
        tensor = module._parameters.get(param)
        if tensor is None:
            return
        if has_block_scales(module) and param == SCALES:
            place_scales(module, param, mesh, self.param_layout(module, param, mesh))
        elif tensor.ndim > 1:
            place_features(module, param, mesh, in_dim(module, tensor))
        else:
            place(module, param, mesh, Replicate())

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: the matmul runs on local tensors."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> LocalParams:
        """Local weight, and no bias: it is added once, after the sum."""
        return _WithoutBias(module, self.grads_of(module))

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Bring this rank's slice of the input features."""
        x, put = first_input(module, args, kwargs)
        cut = cut_of(module)
        if isinstance(x, DTensor):
            return put(own_features(x, cut))
        if isinstance(self.input_layouts, Replicate):
            return put(split_to(x, mesh, dim=-1))
        if cut is not None and cut.real is not None:
            return put(rearranged(x, -1, cut.real))
        return args, kwargs

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the terms and add the bias."""
        layout, shape = self.output_layouts, output.shape
        if isinstance(layout, Replicate):
            output = sum_from(output, mesh)
        elif isinstance(layout, Shard):
            output = scatter_sum(output, mesh, dim=layout.dim)
        bias = module._parameters.get("bias")
        if bias is not None:
            output = output + self._bias(bias, output, mesh)
        return output if self.use_local_output else as_dtensor(output, mesh, layout, shape)

    def _bias(self, bias: torch.Tensor, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """What a rank adds to its output so that the bias is in the whole once."""
        layout = self.output_layouts
        if isinstance(layout, Partial):  # one of the terms has it
            whole = local(bias, "sum") * float(mesh.get_local_rank() == 0)
        elif isinstance(layout, Shard) and layout.dim in (-1, output.ndim - 1):
            whole = split_to(local(bias), mesh, dim=-1)
        else:  # tokens of its own: each rank's gradient is a term
            whole = local(bias, "sum" if isinstance(layout, Shard) else "own")
        return whole.to(output.dtype)  # autocast runs the product in another dtype

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the border around the forward; a plain `nn.Linear` gets one fused function."""
        simple = isinstance(self.output_layouts, Replicate) and self.use_local_output
        if simple and hooks_are(self, RowwiseParallel) and is_plain(module):
            cut = cut_of(module)
            if isinstance(self.input_layouts, Replicate):
                return bind_forward(module, self, mesh, forwards.rowwise_split)
            padded = cut is not None and cut.cut.is_padded
            return bind_forward(
                module, self, mesh, forwards.rowwise_heads if padded else forwards.rowwise
            )
        return super().install_forward(module, mesh)


class _WithoutBias(LocalParams):
    """Local parameters of a module, its bias hidden."""

    __slots__ = ()

    def __enter__(self) -> None:
        bias = self.params.get("bias")
        if bias is not None:
            self.saved.append(("bias", bias))
            self.params["bias"] = None
        for name, param in self.params.items():
            if isinstance(param, DTensor):
                self.saved.append((name, param))
        for name, param in self.saved:
            if name != "bias":
                self.params[name] = self.local(name, param)  # type: ignore[assignment]


_gathered = ColwiseParallel(output_layouts=Replicate())
_sliced = RowwiseParallel(input_layouts=Replicate())


ALL_PARALLEL_STYLES.register("colwise", ColwiseParallel())
ALL_PARALLEL_STYLES.register("colwise_gather_output", _gathered)
ALL_PARALLEL_STYLES.register("colwise_rep", _gathered)
ALL_PARALLEL_STYLES.register("rowwise", RowwiseParallel())
ALL_PARALLEL_STYLES.register("rowwise_split_input", _sliced)
ALL_PARALLEL_STYLES.register("rowwise_rep", _sliced)
