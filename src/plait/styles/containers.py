"""Modules that no rule names: their parameters are whole, and their forward sees plain tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.styles.code import kind_of, mentioned, reads
from plait.styles.embedding import EmbeddingParallel
from plait.styles.layer import TensorParallelLayer
from plait.styles.params import GradMode, LocalParams
from plait.styles.table import ReadTables
from plait.styles.whole import ReplicateParallel

# Modules of torch whose forward reads their children's parameters directly.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def style_of_rest(
    module: nn.Module,
    name: str,
    styled: Mapping[str, TensorParallelLayer],
) -> TensorParallelLayer | None:
    """The style of a module that no rule names, or None where it holds no parameter itself.

    Args:
        module: The module.
        name: Its name.
        styled: Modules that rules name.
    """
    if isinstance(module, _READS_CHILDREN):
        below = f"{name}." if name else ""
        if not any(other.startswith(below) for other in styled):
            return _TREE
    if isinstance(module, nn.RNNBase):
        return _RNN
    read, tables = _read_from_outside(module), _tables_read(module, name, styled)
    if read or tables:
        module.__dict__[_READ] = read
        module.__dict__[_TABLES] = tables
        return _CHILDREN
    if any(param is not None for param in module._parameters.values()):
        return _REPLICATE
    return None


_LISTS = (nn.ParameterList, nn.ParameterDict)
_READ = "_plait_read"  # on a module: modules below it whose parameters its own code reads
_TABLES = "_plait_tables"  # … embeddings split over the vocabulary among them


def _tables_read(
    module: nn.Module, name: str, styled: Mapping[str, TensorParallelLayer]
) -> list[nn.Module]:
    """Embeddings split over the vocabulary whose weight the module's own code reads."""
    found = []
    for below in reads(kind_of(module)):
        style = styled.get(f"{name}.{below}" if name else below)
        if isinstance(style, EmbeddingParallel) and style.shard_dim == 0:
            found.append(module.get_submodule(below))
    return found


def _read_from_outside(module: nn.Module) -> list[nn.Module]:
    """Modules below one whose parameters are read without a call of their forward.

    A convolution whose weight is handed to a kernel, a table that is indexed, a module of which
    another method than `forward` is called: their parameters have to be plain tensors in the module
    above them.
    """
    names = mentioned(kind_of(module))
    found = []
    for child in module.children():
        below = [child, *child.children()]
        found += [part for part in below if names & set(part._parameters)]
        outside = mentioned(kind_of(child), only=names - {"forward"}) & set(child._parameters)
        if isinstance(child, _LISTS) or (outside and child not in found):
            found.append(child)
    return [part for part in found if any(p is not None for p in part._parameters.values())]


def _grads(part: nn.Module) -> Mapping[str, GradMode] | None:
    """Gradient modes of a module's parameters, as its own style has them."""
    border = part.__dict__.get("_plait_border")
    return border.style.grads_of(part) if border is not None else None


class _TreeParams:
    """Local parameters in several modules."""

    __slots__ = ("contexts",)

    def __init__(
        self,
        parts: Iterable[nn.Module],
        tables: Sequence[nn.Module] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.contexts: list[Any] = [LocalParams(part, _grads(part)) for part in parts]
        if tables and mesh is not None:
            self.contexts.append(ReadTables(list(tables), mesh))

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
        return _TreeParams(module.modules())


class _Children(ReplicateParallel):
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        whole = [part for part in module.__dict__[_READ] if not _is_split(part)]
        return _TreeParams([module, *whole], module.__dict__[_TABLES], mesh)


def _is_split(part: nn.Module) -> bool:
    """Whether a module's parameters are cut, so that only its own forward can use them."""
    return any(
        isinstance(param, DTensor) and not all(p.is_replicate() for p in param.placements)
        for param in part._parameters.values()
    )


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
_CHILDREN = _Children()
_RNN = _Rnn()
