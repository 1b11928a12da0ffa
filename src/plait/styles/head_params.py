"""Parameters with an entry for every head: sinks, slopes, norms of each head, bias tables."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import PlanError
from plait.plan.intervals import ParamLayout
from plait.styles.heads import cut_layout, cut_of, place_features, rearranged
from plait.styles.layer import TensorParallelLayer
from plait.styles.params import LocalParams
from plait.styles.registry import ALL_PARALLEL_STYLES


class PlacedParams(LocalParams):
    """Local parameters with an entry for every place that the rank's attention computes."""

    __slots__ = ()

    def local(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """The rank's part, with entries repeated where the attention computes a head twice."""
        x, cut = super().local(name, param), cut_of(self.module, name)
        if cut is None or cut.places is None or name not in cut.dims:
            return x
        return rearranged(x, cut.dims[name], cut.places)


class HeadParams(TensorParallelLayer):
    """Parameters with one entry, or one row, for every head: sinks, slopes, norms of each head.

    On a module it cuts all of the module's own parameters along dim 0 (or along the first dim that
    is the number of heads), and the module's forward sees those of this rank's heads. On a single
    parameter it cuts this one.

    Comm:
        None, except for heads that several ranks share: forward one all-gather of their entries,
        backward one reduce-scatter.
    """

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The entries of the rank's own heads, where they are no ordinary shard."""
        return cut_layout(module, param, self._dim(module, param))

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the dim of heads."""
        if module._parameters.get(param) is not None:
            place_features(module, param, mesh, self._dim(module, param))

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, an entry for every place."""
        return PlacedParams(module, self.grads_of(module))

    @staticmethod
    def _dim(module: nn.Module, param: str) -> int:
        tensor, cut = module._parameters.get(param), cut_of(module, param)
        if tensor is None or cut is None:
            return 0
        return next((d for d, size in enumerate(tensor.shape) if size == cut.cut.size), 0)


class HeadEmbedding(TensorParallelLayer):
    """An embedding with one column for every head (a table of relative position biases).

    Each rank holds the columns of its heads; the output stays split.

    Comm: none.
    """

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse what is no embedding."""
        if not isinstance(module, nn.Embedding):
            raise PlanError(
                f"Style 'head_embedding' on {name!r}:",
                f"{type(module).__name__} is not an nn.Embedding",
                "give it the style 'replicate'",
            )

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The columns of the rank's own heads."""
        return cut_layout(module, param, 1)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the columns."""
        place_features(module, param, mesh, 1)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, a column for every place."""
        return PlacedParams(module, self.grads_of(module))


ALL_PARALLEL_STYLES.register("head_params", HeadParams())
ALL_PARALLEL_STYLES.register("head_embedding", HeadEmbedding())
