"""Linear layers by kind: their features, and which dim of a parameter is which.

`nn.Linear` and its subclasses keep a weight `[out, in]`; the `Conv1D` of transformers, which GPT-2
has, keeps `[in, out]`.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import PlanError
from plait.plan.intervals import even
from plait.styles.quantized import has_block_scales, is_quantized


def validate_linear(module: nn.Module, style: str, name: str) -> None:
    """Refuse a module that is no linear layer with a plain floating weight."""
    weight = module._parameters.get("weight")
    width = features(module)
    expected = width[::-1] if is_conv1d(module) else width
    kind = type(module).__name__
    problem = None
    if is_quantized(weight):
        return
    if weight is None or width == (None, None):
        problem = f"{kind} is not a linear layer with a weight [out_features, in_features]"
    elif tuple(weight.shape) != expected or not weight.is_floating_point():
        problem = (
            f"the weight of this {kind} is {tuple(weight.shape)} of {weight.dtype}, not "
            f"{expected} of floats: packed weights of this kind cannot be split"
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
    if is_conv1d(module):
        return module.nf, module.nx  # type: ignore[return-value]
    out, into = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return out if isinstance(out, int) else None, into if isinstance(into, int) else None


def slices(module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Width of each rank's output features, where this rank's output is `[..., features_local]`."""
    width = features(module)[0] or output.shape[-1] * mesh.size()
    return even((width,), 0, mesh.size()).sizes


def out_dim(module: nn.Module, tensor: torch.Tensor) -> int:
    """The dim of output features of one parameter."""
    if is_conv1d(module):
        return tensor.ndim - 1
    return max(tensor.ndim - 2, 0)


def in_dim(module: nn.Module, tensor: torch.Tensor) -> int:
    """The dim of input features of a weight."""
    return 0 if is_conv1d(module) else tensor.ndim - 1


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of GPT-2 and its kin, whose weight is `[in, out]`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def is_linear(module: nn.Module) -> bool:
    """Whether a module's forward is that of `nn.Linear`."""
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def is_plain(module: nn.Module) -> bool:
    """Whether the fused forwards say all that the module's own does."""
    return is_linear(module) or (is_conv1d(module) and "forward" not in module.__dict__)


def validate_dims(module: nn.Module, param: str, parameter_name: str | None, style: str) -> None:
    """Refuse a parameter without a dim."""
    tensor = module._parameters.get(param)
    if tensor is not None and tensor.ndim == 0 and not has_block_scales(module):
        raise PlanError(
            f"Style {style!r} on {parameter_name or param!r}:",
            "it is a scalar; there is no dimension to cut",
            "give it the style 'replicate'",
        )
