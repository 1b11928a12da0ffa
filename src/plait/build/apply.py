"""Applying a plan: a loop that decides nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.errors import PlanError
from plait.plan import Entry, Plan
from plait.plan.intervals import ParamLayout
from plait.state import layout_of
from plait.styles import ALL_PARALLEL_STYLES, TensorParallelLayer
from plait.styles.containers import style_of_rest
from plait.styles.params import replicate


def apply(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, ParamLayout]:
    """Cut the parameters that rules name, make the rest DTensors, put the borders in place.

    Returns:
        Parameter name → which index ranges each rank holds.
    """
    modules = dict(module.named_modules())
    cut = _Cutter(mesh)
    by_module: dict[str, TensorParallelLayer] = {}
    for entry, style, part, params in work(modules, plan):
        owner = entry.name if entry.kind == "module" else entry.name.rpartition(".")[0]
        for name in params:
            cut(style, part, name, f"{owner}.{name}" if owner else name)
        if entry.kind == "module":
            by_module[entry.name] = style
    for owner, part in modules.items():
        for name in list(part._parameters):
            if not isinstance(part._parameters[name], DTensor):
                cut.leave_whole(part, name, f"{owner}.{name}" if owner else name)
    for owner, part in modules.items():
        rest = by_module.get(owner) or style_of_rest(part, owner, modules, by_module)
        if rest is not None:
            rest.install_forward(part, mesh)
    return cut.layouts


def work(
    modules: Mapping[str, nn.Module], plan: Plan
) -> Iterator[tuple[Entry, TensorParallelLayer, nn.Module, list[str]]]:
    """Every entry with its style, its module and the names of the parameters it decides on."""
    named = {entry.name for entry in plan.entries if entry.kind == "param"}
    for entry in plan.entries:
        style = ALL_PARALLEL_STYLES[entry.style]
        if entry.kind == "param":
            owner, _, name = entry.name.rpartition(".")
            yield entry, style, modules[owner], [name]
            continue
        part = modules[entry.name]
        full = {n: f"{entry.name}.{n}" if entry.name else n for n in part._parameters}
        yield entry, style, part, [n for n, f in full.items() if f not in named]


class _Cutter:
    """Cuts parameters one by one and keeps tied ones tied."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.layouts: dict[str, ParamLayout] = {}
        self._done: dict[int, tuple[nn.Parameter, nn.Parameter, str]] = {}

    def __call__(self, style: TensorParallelLayer, part: nn.Module, name: str, full: str) -> None:
        before = part._parameters.get(name)
        if before is None:
            return
        layout = style.param_layout(part, name, self.mesh)
        style.shard_param(part, name, self.mesh)
        self._keep_tied(before, part, name, full)
        after = part._parameters[name]
        if isinstance(after, DTensor):
            self.layouts[full] = layout or layout_of(after, self.mesh.size(), full)

    def leave_whole(self, part: nn.Module, name: str, full: str) -> None:
        before = part._parameters.get(name)
        if before is None:
            return
        replicate(part, name, self.mesh)
        self._keep_tied(before, part, name, full)
        self.layouts[full] = layout_of(part._parameters[name], self.mesh.size(), full)  # type: ignore[arg-type]

    def _keep_tied(self, before: nn.Parameter, part: nn.Module, name: str, full: str) -> None:
        after = part._parameters[name]
        assert after is not None
        if after is before:
            return
        known = self._done.get(id(before))
        if known is None:
            self._done[id(before)] = (before, after, full)  # `before` is kept: its id stays taken
            return
        first = known[1]
        if _placements(first) != _placements(after):
            raise PlanError(
                f"{full!r} and {known[2]!r} are one tied parameter:",
                f"their styles place it as {_placements(after)} and {_placements(first)}",
                "give both a style that cuts the same dim",
            )
        part._parameters[name] = first


def _placements(param: torch.Tensor) -> Any:
    return param.placements if isinstance(param, DTensor) else None
