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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plait.comm import (
    all_gather,
    all_reduce_,
    copy_to,
    gather_from,
    local,
    scatter_sum,
    split_to,
    sum_from,
)
from plait.errors import PlanError
from plait.plan.intervals import ParamLayout
from plait.plan.roles import FUSED
from plait.styles.activations import (
    as_dtensor,
    leave_split_features,
    to_replicate,
    uneven_sizes,
)
from plait.styles.heads import cut_layout, cut_of, place_features, rearranged
from plait.styles.layer import (
    Args,
    Kwargs,
    TensorParallelLayer,
    bind_forward,
    border_of,
    first_input,
    hooks_are,
)
from plait.styles.params import LocalParams, needed_param, place
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
        _validate_linear(module, "colwise", name)

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of output features."""
        _validate_dims(module, param, parameter_name, "colwise")

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The features of the rank's own heads, where they are no ordinary shard."""
        tensor = module._parameters.get(param)
        return None if tensor is None else cut_layout(module, param, out_dim(module, tensor))

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the output features."""
        tensor = module._parameters.get(param)
        if tensor is not None:
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
        out_features = features(module)[0]
        return leave_split_features(
            output, out_features, self.output_layouts, self.use_local_output, mesh
        )

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the border around the forward; a plain `nn.Linear` gets one fused function."""
        simple = isinstance(self.input_layouts, Replicate) and self.use_local_output
        if simple and hooks_are(self, ColwiseParallel):
            cut, split = cut_of(module), self.output_layouts == Shard(-1)
            plain = cut is None or not (cut.cut.is_shared or cut.cut.is_padded)
            if _has_own_forward(module) and split and not (plain and _is_linear(module)):
                return bind_forward(module, self, mesh, _colwise_heads)
            if _is_linear(module) and split:
                return bind_forward(module, self, mesh, _colwise_linear)
            if _is_linear(module) and isinstance(self.output_layouts, Replicate):
                return bind_forward(module, self, mesh, _colwise_gather_linear)
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
        _validate_linear(module, "rowwise", name)

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of input features."""
        _validate_dims(module, param, parameter_name, "rowwise")

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The features of the rank's own heads, where they are no ordinary shard."""
        tensor = module._parameters.get(param)
        if tensor is None or tensor.ndim < 2:
            return None
        return cut_layout(module, param, in_dim(module, tensor))

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the input features; leave the bias whole."""
        tensor = module._parameters.get(param)
        if tensor is None:
            return
        if tensor.ndim > 1:
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
        if isinstance(x, DTensor):
            return put(x.redistribute(placements=[Shard(x.ndim - 1)]).to_local())
        cut = cut_of(module)
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
        if simple and hooks_are(self, RowwiseParallel):
            cut, split = cut_of(module), isinstance(self.input_layouts, Replicate)
            plain = cut is None or not cut.cut.is_padded
            if _has_own_forward(module) and not split and not (plain and _is_linear(module)):
                return bind_forward(module, self, mesh, _rowwise_heads)
            if _is_linear(module):
                return bind_forward(
                    module, self, mesh, _rowwise_split_linear if split else _rowwise_linear
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


def _validate_linear(module: nn.Module, style: str, name: str) -> None:
    weight = module._parameters.get("weight")
    width = features(module)
    expected = width[::-1] if _is_conv1d(module) else width
    kind = type(module).__name__
    problem = None
    if weight is None or width == (None, None):
        problem = f"{kind} is not a linear layer with a weight [out_features, in_features]"
    elif tuple(weight.shape) != expected or not weight.is_floating_point():
        problem = (
            f"the weight of this {kind} is {tuple(weight.shape)} of {weight.dtype}, not "
            f"{expected} of floats: quantized weights cannot be split yet"
        )
    elif type(weight.data) not in (torch.Tensor, nn.Parameter):
        problem = f"the weight is a {type(weight.data).__name__}, which cannot be split yet"
    if problem is not None:
        raise PlanError(
            f"Style {style!r} on {name!r}:",
            problem,
            ["name the linear layers inside it", "give it the style 'replicate'"],
        )


def features(module: nn.Module) -> tuple[int | None, int | None]:
    """Output and input features of a linear layer, where it tells them."""
    if _is_conv1d(module):
        return module.nf, module.nx  # type: ignore[return-value]
    out, into = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return out if isinstance(out, int) else None, into if isinstance(into, int) else None


def out_dim(module: nn.Module, tensor: torch.Tensor) -> int:
    """The dim of output features of one parameter."""
    if _is_conv1d(module):
        return tensor.ndim - 1
    return max(tensor.ndim - 2, 0)


def in_dim(module: nn.Module, tensor: torch.Tensor) -> int:
    """The dim of input features of a weight."""
    return 0 if _is_conv1d(module) else tensor.ndim - 1


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of GPT-2 and its kin, whose weight is `[in, out]`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the forwards below say all that the module's own does."""
    return _is_linear(module) or (_is_conv1d(module) and "forward" not in module.__dict__)


def _validate_dims(module: nn.Module, param: str, parameter_name: str | None, style: str) -> None:
    tensor = module._parameters.get(param)
    if tensor is not None and tensor.ndim == 0:
        raise PlanError(
            f"Style {style!r} on {parameter_name or param!r}:",
            "it is a scalar; there is no dimension to cut",
            "give it the style 'replicate'",
        )


# The forwards of plain nn.Linear layers, with nothing decided at call time but the grad mode.


def _weight_and_bias(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    params: dict[str, Any] = module._parameters
    return params["weight"], params["bias"]


def _colwise_linear(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    weight, bias = _weight_and_bias(module)
    mesh = border_of(module).mesh
    if isinstance(input, DTensor):
        x = to_replicate(input, Replicate(), mesh)
    else:
        x = copy_to(input, mesh)
    return F.linear(x, local(weight), None if bias is None else local(bias))


def _colwise_gather_linear(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    output = _colwise_linear(module, input)
    mesh = border_of(module).mesh
    sizes = uneven_sizes(module.out_features, mesh.size())
    if torch.is_grad_enabled():
        return gather_from(output, mesh, dim=-1, sizes=sizes)
    replacement = module.__dict__.get("_plait_output")
    if replacement is not None:  # generate() may ask for the best candidates only
        chosen: torch.Tensor = replacement(output)
        return chosen
    return all_gather(output, mesh, dim=-1, sizes=sizes)


def _rowwise_linear(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    weight, bias = _weight_and_bias(module)
    mesh = border_of(module).mesh
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Shard(input.ndim - 1)]).to_local()
    output = F.linear(input, local(weight))
    if torch.is_grad_enabled():
        output = sum_from(output, mesh, fresh=True)
        return output if bias is None else output + local(bias).to(output.dtype)
    output = all_reduce_(output, mesh)
    return output if bias is None else output.add_(local(bias).to(output.dtype))


def _rowwise_split_linear(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    if not isinstance(input, DTensor):
        input = split_to(input, border_of(module).mesh, dim=-1)
    return _rowwise_linear(module, input)


def _product(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight if _is_conv1d(module) else F.linear(x, weight)


def _colwise_heads(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    mesh, cut = border_of(module).mesh, cut_of(module)
    if isinstance(input, DTensor):
        x = to_replicate(input, Replicate(), mesh)
    else:
        x = copy_to(input, mesh)
    weight, bias = _weight_and_bias(module)
    output = _product(module, x, needed_param(module, "weight", local(weight)))
    if bias is not None:
        output = output + needed_param(module, "bias", local(bias))
    if cut is None or cut.places is None:
        return output
    return rearranged(output, -1, cut.places)


def _rowwise_heads(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    weight, bias = _weight_and_bias(module)
    mesh, cut = border_of(module).mesh, cut_of(module)
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Shard(input.ndim - 1)]).to_local()
    elif cut is not None and cut.real is not None:
        input = rearranged(input, -1, cut.real)
    output = sum_from(_product(module, input, local(weight)), mesh, fresh=True)
    return output if bias is None else output + local(bias).to(output.dtype)


_gathered = ColwiseParallel(output_layouts=Replicate())
_sliced = RowwiseParallel(input_layouts=Replicate())


class HeadsColwiseParallel(ColwiseParallel):
    """A colwise layer of several projections in one weight; each rank has those of its heads.

    The name under which it is registered says how the projections lie in the output features:

    | name | output features |
    |---|---|
    | `colwise_qkv` | all query heads, all key heads, all value heads |
    | `colwise_qkv_per_head` | of each head: query, key, value |
    | `colwise_qkv_per_group` | of each key/value head: its query heads, the key, the value |
    | `colwise_kv` | all key heads, all value heads |
    | `colwise_kv_per_head` | of each key/value head: key, value |

    Comm:
        As `colwise`.
    """

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of output features."""
        _validate_dims(module, param, parameter_name, "colwise_qkv")


ALL_PARALLEL_STYLES.register("colwise", ColwiseParallel())
for _name in FUSED:
    ALL_PARALLEL_STYLES.register(_name, HeadsColwiseParallel())
ALL_PARALLEL_STYLES.register("colwise_gather_output", _gathered)
ALL_PARALLEL_STYLES.register("colwise_rep", _gathered)
ALL_PARALLEL_STYLES.register("rowwise", RowwiseParallel())
ALL_PARALLEL_STYLES.register("rowwise_split_input", _sliced)
ALL_PARALLEL_STYLES.register("rowwise_rep", _sliced)
