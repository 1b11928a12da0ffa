"""Modules whose own code takes a mean or a variance over a width that is split.

A norm over the whole width of q or k, between the projections and the attention, sees the features
of this rank's heads only. Its own forward runs here, but every mean, variance or standard deviation
over the last dim is taken over the whole width: one all-reduce of one number a row. Features that a
rank has twice, or that another rank counts, are left out of the sums.

Source: Ba et al., Layer Normalization (arXiv 1607.06450), eq. 3; Zhang and Sennrich, Root Mean
Square Layer Normalization (arXiv 1910.07467), eq. 4.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plait.errors import PlanError
from plait.plan.intervals import even
from plait.styles.head_params import PlacedParams
from plait.styles.heads import cut_layout, cut_of, place_features
from plait.styles.layer import TensorParallelLayer
from plait.styles.linear import ColwiseParallel
from plait.styles.linear_kinds import features
from plait.styles.packed import PackedColwiseParallel
from plait.styles.params import LocalParams
from plait.styles.registry import ALL_PARALLEL_STYLES
from plait.styles.whole_statistics import (
    Statistics,
    StatisticsOfFlow,
    StatisticsOfWidth,
    Width,
    note_width,
)


class SplitNorm(TensorParallelLayer):
    """A norm over a width that is split: q or k as a whole, or what comes before a rowwise layer.

    Parameters: cut along their only dim, as the width is.

    Comm:
        Forward one all-reduce of one number a row (an RMS norm), or two of them (a layer norm).
        Backward as many.
    """

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter that has more than one dim."""
        tensor = module._parameters.get(param)
        if tensor is not None and tensor.ndim != 1:
            raise PlanError(
                f"Style 'split_norm' on {parameter_name or param!r}:",
                f"it has the shape {tuple(tensor.shape)}; a norm over a width has one dim",
                "give it the style 'replicate'",
            )

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> Any:
        """The features of the rank's own heads, where they are no ordinary shard."""
        return cut_layout(module, param, 0)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut it along the width."""
        place_features(module, param, mesh, 0)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, statistics over the whole width."""
        found = next((p for p in module._parameters.values() if p is not None), None)
        cut = cut_of(module)
        context = ExitStack()
        if found is not None:
            whole = found.shape[0]
            counted = cut.counted if cut is not None else None
            local = cut.seen_size if cut is not None else _even_size(whole, mesh)
            context.enter_context(PlacedParams(module, self.grads_of(module)))
            width = Width(local, whole, counted)
            mode = StatisticsOfWidth(width, mesh, type(module).__name__)
            context.enter_context(_Answering(mode, "split_norm"))
        return context


class SplitStatistics(TensorParallelLayer):
    """A module that takes statistics over the output width of its own colwise layers.

    An MLP that keeps the largest activations only (mean and standard deviation over the
    intermediate width) is the usual case. The parameters of the module itself stay whole.

    Comm:
        Forward one all-reduce of one number a row for a mean, two for a variance or a standard
        deviation. Backward as many.
    """

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local parameters, statistics over the whole width."""
        context = ExitStack()
        context.enter_context(LocalParams(module, self.grads_of(module)))
        for child in module.children():
            if _leaves_split(child):
                handle = child.register_forward_hook(_note)
                context.callback(handle.remove)
        mode = StatisticsOfFlow(mesh, type(module).__name__)
        context.enter_context(_Answering(mode, "split_statistics"))
        return context


def _leaves_split(child: nn.Module) -> bool:
    """Whether the output features of a child stay split."""
    border = child.__dict__.get("_plait_border")
    if border is None or features(child)[0] is None:
        return False
    style = border.style
    if isinstance(style, ColwiseParallel):
        return style.output_layouts == Shard(-1) and style.use_local_output
    return isinstance(style, PackedColwiseParallel)


def _note(child: nn.Module, args: Any, output: Any) -> None:
    whole, cut = features(child)[0], cut_of(child)
    assert whole is not None
    counted = cut.counted if cut is not None else None
    note_width((output,), Width(output.shape[-1], whole, counted))


class _Answering:
    """Runs a forward in `mode`, and refuses one in which there was nothing to answer."""

    def __init__(self, mode: Statistics, style: str) -> None:
        self.mode, self.style = mode, style

    def __enter__(self) -> None:
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and not self.mode.answered and not torch.compiler.is_compiling():
            raise PlanError(
                f"Style {self.style!r} on a {self.mode.name}:",
                "its forward took no mean, variance or norm over the split width that torch's "
                "functions show: it may run a fused kernel",
                ["an implementation in plain torch", "give it the style 'replicate'"],
            )


def _even_size(width: int, mesh: DeviceMesh) -> int:
    return even((width,), 0, mesh.size()).local_shape(mesh.get_local_rank())[0]


ALL_PARALLEL_STYLES.register("split_norm", SplitNorm())
ALL_PARALLEL_STYLES.register("split_statistics", SplitStatistics())
