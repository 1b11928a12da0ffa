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
from plait.state import LAYOUT
from plait.styles import ALL_PARALLEL_STYLES, TensorParallelLayer
from plait.styles.attention import localize
from plait.styles.containers import style_of_rest
from plait.styles.heads import set_cut
from plait.styles.layer import border_of
from plait.styles.mla import ROPE_DIM
from plait.styles.params import replicate
from plait.weights.slots import layout_of_tensor


def apply(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, ParamLayout]:
    """Cut the parameters that rules name, make the rest DTensors, put the borders in place.

    Returns:
        Parameter name → which index ranges each rank holds.

    Raises:
        PlanError: A style of the user's cuts a tied weight in two ways, or a parameter that no
            forward would see as cut. The module is as it was.
    """
    modules = dict(module.named_modules())
    before = [(part, dict(part._parameters), dict(part.__dict__)) for part in modules.values()]
    try:
        return _apply(modules, plan, mesh)
    except BaseException:
        for part, params, attributes in before:
            part._parameters.update(params)
            part.__dict__.clear()
            part.__dict__.update(attributes)
        raise


def mark_cuts(modules: Mapping[str, nn.Module], plan: Plan, mesh: DeviceMesh) -> None:
    """Tell modules on the borders of which heads they are cut."""
    for name, found in plan.cuts.items():
        owner, key = (name, "") if name in modules else name.rsplit(".", 1)
        set_cut(modules[owner], key, found, mesh)


def _apply(modules: dict[str, nn.Module], plan: Plan, mesh: DeviceMesh) -> dict[str, ParamLayout]:
    mark_cuts(modules, plan, mesh)
    for name, size in plan.rope_dims.items():
        modules[name].__dict__[ROPE_DIM] = size
    cut = _Cutter(mesh)
    by_module: dict[str, TensorParallelLayer] = {}
    single: list[tuple[Entry, TensorParallelLayer, nn.Module, str]] = []
    for entry, style, part, params in work(modules, plan):
        owner = entry.name if entry.kind == "module" else entry.name.rpartition(".")[0]
        for name in params:
            cut(style, part, name, f"{owner}.{name}" if owner else name)
        if entry.kind == "module":
            by_module[entry.name] = style
        else:
            single.append((entry, style, part, params[0]))
    _refuse_unseen(single, cut.layouts, plan)
    for owner, part in modules.items():
        for name in list(part._parameters):
            if not isinstance(part._parameters[name], DTensor):
                cut.leave_whole(part, name, f"{owner}.{name}" if owner else name)
    for owner, part in modules.items():
        rest = by_module.get(owner) or style_of_rest(part, owner, by_module)
        if rest is not None:
            rest.install_forward(part, mesh)
    for name, attention in plan.attention.items():
        localize(modules[name], attention, mesh)
    for _, style, part, name in single:
        if name in style.param_grads(part) and "_plait_border" in part.__dict__:
            border_of(part).grads[name] = style.param_grads(part)[name]
    return cut.layouts


def _refuse_unseen(
    single: list[tuple[Entry, TensorParallelLayer, nn.Module, str]],
    layouts: Mapping[str, ParamLayout],
    plan: Plan,
) -> None:
    """Refuse a parameter that is cut by itself while its module knows nothing of it."""
    styled = {e.name: e.style for e in plan.entries if e.kind == "module"}
    problems = []
    for entry, _, part, _ in single:
        owner = entry.name.rpartition(".")[0]
        cut = entry.name in layouts and layouts[entry.name].dim is not None
        cut = cut and entry.origin != "tied"  # its module only keeps it
        if cut and styled.get(owner, "replicate") == "replicate":
            problems.append(
                f"rule {entry.rule!r} cuts a parameter of {owner!r} ({type(part).__name__}), "
                "whose forward no rule adapts"
            )
    if problems:
        raise PlanError(
            "The plan cannot be applied:",
            list(dict.fromkeys(problems)),
            [
                "give the module 'local_params' if its forward is right on a slice",
                "give it a style of its own, or the parameter 'replicate'",
            ],
        )


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
            self.layouts[full] = layout or layout_of_tensor(full, after)
            if layout is not None:
                after.__dict__[LAYOUT] = layout

    def leave_whole(self, part: nn.Module, name: str, full: str) -> None:
        before = part._parameters.get(name)
        if before is None:
            return
        replicate(part, name, self.mesh)
        self._keep_tied(before, part, name, full)
        after = part._parameters[name]
        assert after is not None
        self.layouts[full] = layout_of_tensor(full, after)

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
