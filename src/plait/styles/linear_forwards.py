"""The forwards of plain linear layers, with nothing decided at call time but the grad mode."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from plait.comm import all_gather, all_reduce_, copy_to, gather_from, local, split_to, sum_from
from plait.loss.asking import asked_of, split_output
from plait.styles.activations import to_replicate, uneven_sizes
from plait.styles.heads import cut_of, own_features, rearranged
from plait.styles.layer import border_of
from plait.styles.linear_kinds import features, is_conv1d, slices
from plait.styles.params import needed_param


def colwise(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """`nn.Linear`: whole input, this rank's output features."""
    weight, bias = _weight_and_bias(module)
    x = _whole(module, input)
    return F.linear(x, local(weight), None if bias is None else local(bias))


def colwise_heads(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Any plain linear layer: whole input, the output features of this rank's heads."""
    weight, bias = _weight_and_bias(module)
    cut = cut_of(module)
    x, needed = _whole(module, input), needed_param(module, "weight", local(weight))
    if bias is None:
        output = _product(module, x, needed)
    else:  # in one function: autocast gives both the same dtype
        output = _sum(module, x, needed, needed_param(module, "bias", local(bias)))
    if cut is None or cut.places is None:
        return output
    return rearranged(output, -1, cut.places)


def colwise_gather(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Any plain linear layer: whole input, whole output."""
    output = colwise_heads(module, input) if is_conv1d(module) else colwise(module, input)
    mesh = border_of(module).mesh
    sizes = uneven_sizes(features(module)[0], mesh.size())
    asked = asked_of(module)
    if asked is not None and "_plait_output" not in module.__dict__:
        return split_output(output, slices(module, output, mesh), mesh, asked)
    if torch.is_grad_enabled():
        return gather_from(output, mesh, dim=-1, sizes=sizes)
    replacement = module.__dict__.get("_plait_output")
    if replacement is not None:  # generate() may ask for the best candidates only
        chosen: torch.Tensor = replacement(output)
        return chosen
    return all_gather(output, mesh, dim=-1, sizes=sizes)


def rowwise(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Any plain linear layer: this rank's input features, whole output."""
    return _summed(module, *_own_term(module, input))


def rowwise_heads(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """As `rowwise`, where the attention computes some heads twice: these are dropped first."""
    return _summed(module, *_own_term(module, _own_heads(module, input)))


def rowwise_split(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Any plain linear layer: whole input, whole output."""
    return _summed(module, *_own_term(module, _own_slice(module, input)))


def rowwise_term(
    module: nn.Module, input: torch.Tensor
) -> tuple[torch.Tensor, nn.Parameter | None]:
    """What this rank adds to the output of a row-parallel layer, and the bias that comes after.

    Args:
        module: One whose forward is one of the three above.
        input: As its forward takes it.
    """
    style = border_of(module).style
    if getattr(style, "input_layouts", None) == Replicate():
        return _own_term(module, _own_slice(module, input))
    return _own_term(module, _own_heads(module, input))


def _own_heads(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    cut = cut_of(module)
    if cut is not None and cut.real is not None and not isinstance(input, DTensor):
        return rearranged(input, -1, cut.real)
    return input


def _own_slice(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    if isinstance(input, DTensor):
        return input
    return split_to(input, border_of(module).mesh, dim=-1)


def _own_term(module: nn.Module, input: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
    weight, bias = _weight_and_bias(module)
    if isinstance(input, DTensor):
        input = own_features(input, cut_of(module))
    return _product(module, input, local(weight)), bias


def _summed(module: nn.Module, output: torch.Tensor, bias: nn.Parameter | None) -> torch.Tensor:
    mesh = border_of(module).mesh
    if torch.is_grad_enabled():
        output = sum_from(output, mesh, fresh=True)
        return output if bias is None else output + local(bias).to(output.dtype)
    output = all_reduce_(output, mesh)
    return output if bias is None else output.add_(local(bias).to(output.dtype))


def _weight_and_bias(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    params: dict[str, Any] = module._parameters
    return params["weight"], params["bias"]


def _whole(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    mesh = border_of(module).mesh
    if isinstance(input, DTensor):
        return to_replicate(input, Replicate(), mesh)
    return copy_to(input, mesh)


def _product(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight if is_conv1d(module) else F.linear(x, weight)


def _sum(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    if not is_conv1d(module):
        return F.linear(x, weight, bias)
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[-1])
