"""Modules that no rule names: their parameters are whole, and their forward sees plain tensors."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.styles.layer import TensorParallelLayer
from plait.styles.params import LocalParams
from plait.styles.whole import ReplicateParallel

# Modules of torch whose forward reads their children's parameters directly.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def style_of_rest(
    module: nn.Module,
    name: str,
    modules: Mapping[str, nn.Module],
    styled: Mapping[str, TensorParallelLayer],
) -> TensorParallelLayer | None:
    """The style of a module that no rule names, or None where it holds no parameter itself.

    Args:
        module: The module.
        name: Its name.
        modules: All modules by name.
        styled: Modules that rules name.
    """
    if isinstance(module, _READS_CHILDREN):
        below = f"{name}." if name else ""
        if not any(other.startswith(below) for other in styled):
            return _TREE
    if isinstance(module, nn.RNNBase):
        return _RNN
    if any(param is not None for param in module._parameters.values()):
        return _REPLICATE
    return None


class _TreeParams:
    """Local parameters in a module and everything below it."""

    __slots__ = ("contexts",)

    def __init__(self, module: nn.Module) -> None:
        self.contexts = [LocalParams(part) for part in module.modules()]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in self.contexts:
            context.__exit__(None, None, None)


class _RnnParams:
    """Local parameters of a recurrent module, in the flat list that its kernel reads as well."""

    __slots__ = ("inner", "module", "saved")

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module
        self.inner = LocalParams(module)
        self.saved: list[Any] = module.__dict__["_flat_weights"]

    def __enter__(self) -> None:
        self.inner.__enter__()
        names = self.module._flat_weights_names
        self.module.__dict__["_flat_weights"] = [self.module._parameters[n] for n in names]

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(None, None, None)
        self.module.__dict__["_flat_weights"] = self.saved


class _Tree(ReplicateParallel):
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        return _TreeParams(module)


class _Rnn(ReplicateParallel):
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        assert isinstance(module, nn.RNNBase)
        return _RnnParams(module)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        # The flat list must hold the DTensors, not the tensors from before the split.
        names: Any = module._flat_weights_names
        flat = [module._parameters[n] for n in names]
        assert all(isinstance(p, DTensor) for p in flat if p is not None)
        module.__dict__["_flat_weights"] = flat
        return super().install_forward(module, mesh)


_REPLICATE = ReplicateParallel()
_TREE = _Tree()
_RNN = _Rnn()
