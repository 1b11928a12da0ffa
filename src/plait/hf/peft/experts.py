"""Adapters of single parameters (`target_parameters`): the stacked weights of experts.

PEFT adds scaling · B A to the parameter for the time of the layer's forward. Here each rank adds
the part that belongs to its own slice. A factor on the side that is not split is whole on every
rank, and each rank's gradient of it is a term of a sum.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.comm import local
from plait.hf.peft.styles import AlongFeatures
from plait.styles import TensorParallelLayer
from plait.styles.params import ADDED
from plait.surgery.loading import layout_of

_MESH = "_plait_adapter_mesh"


def split_dim(part: Any) -> int | None:
    """The dim of the adapted parameter that is split, or None."""
    param = part.get_base_layer()._parameters[part.parameter_name]
    return layout_of(part.parameter_name, param).dim


def sides_of(part: Any) -> tuple[int, int]:
    """The dims of input and output features of the adapted parameter, as PEFT takes them."""
    ndim = part.get_base_layer()._parameters[part.parameter_name].ndim
    if ndim == 2:
        return 1, 0
    return (2, 1) if part._did_swap_in_out_features else (1, 2)


def can_adapt(part: Any) -> bool:
    """Whether the parameter is split along its features, and not by experts."""
    return split_dim(part) in (None, *sides_of(part))


def styles(part: Any) -> dict[str, TensorParallelLayer]:
    """The factor on the split side is cut as the parameter."""
    dim, (into, _) = split_dim(part), sides_of(part)
    if dim is None:
        return {}
    base, name = part.get_base_layer(), part.parameter_name
    which, along = ("lora_A", 1) if dim == into else ("lora_B", 0)
    style = AlongFeatures(base, along, name)
    return {f"{which}.{adapter}": style for adapter in getattr(part, which)}


def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A wrapper's forward: the layer's, with the adapted parameter in its place."""
    module._check_forward_args(*args, **kwargs)
    if module.disable_adapters and module.merged:
        module.unmerge()
    adapters = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not adapters:
        return module.base_layer(*args, **kwargs)
    with _added(module, adapters):
        return module.base_layer(*args, **kwargs)


@contextmanager
def _added(module: Any, adapters: list[str]) -> Iterator[None]:
    base, name = module.get_base_layer(), module.parameter_name
    before: dict[str, Callable[[torch.Tensor], torch.Tensor]] = base.__dict__.get(ADDED, {})

    def add(x_local: torch.Tensor) -> torch.Tensor:
        for adapter in adapters:
            x_local = x_local + _delta(module, adapter).to(x_local.dtype)
        return x_local

    base.__dict__[ADDED] = {**before, name: add}
    param = base._parameters[name]
    if not isinstance(param, DTensor):  # gathered by FSDP: no border hands it to the forward
        base._parameters[name] = add(param)
    try:
        yield
    finally:
        base.__dict__[ADDED] = before
        base._parameters[name] = param


def _delta(module: Any, adapter: str) -> torch.Tensor:
    """This rank's part of what an adapter adds to the parameter, `[experts, …]` as it is stored.

    Comm:
        Backward one all-reduce of the gradient of the whole factor.
    """
    mesh: DeviceMesh = module.__dict__[_MESH]
    dim, (into, _) = split_dim(module), sides_of(module)
    whole = {"lora_A": dim is not None and dim != into, "lora_B": dim is not None and dim == into}
    a, b = (
        local(getattr(module, which)[adapter].weight, "sum" if whole[which] else "own", mesh)
        for which in ("lora_A", "lora_B")
    )
    scaling: float = module.scaling[adapter]
    if module.num_experts == 1:
        return (b @ a) * scaling
    # A: [experts · r, in], expert by expert; B: [out, r · experts], expert innermost.
    a = a.reshape(module.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, module.num_experts)
    stored = (
        "o r e, e r i -> e o i" if module._did_swap_in_out_features else "o r e, e r i -> e i o"
    )
    return torch.einsum(stored, b, a) * scaling


def bind(part: Any, mesh: DeviceMesh) -> None:
    """Let a wrapper add each rank's part; see `forward`."""
    from plait.styles.layer import rebind

    part.__dict__[_MESH] = mesh
    rebind(part, forward)
