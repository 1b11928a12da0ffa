"""The ordered composition: what happens to a module, in which order, and why in that order.

1. Resolve the sizes against the processes. Nothing else makes sense if they do not fit.
2. Make the mesh: its axes are all that later steps know of the processes.
3. Resolve the plan and check every style against every parameter: all refusals come before the
   first change, so a refused module is as it was.
4. Cut the parameters that rules name. On meta this only notes which slice the reader will read.
5. Make every other parameter a DTensor that is whole on every rank, so that optimizers and norms
   meet one kind of parameter.
6. Put the borders around the forwards.
7. For a model of transformers, bind what has to know that it is split: generate() and
   save_pretrained(). Last, since they look at the finished borders.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait import mesh as meshes
from plait.errors import LayoutError, PlanError
from plait.hf.adapt import adapt, is_transformers_model
from plait.hf.plans import missing_rules
from plait.layout import DistributedConfig, ParallelismConfig
from plait.plan import Entry, ModelNames, Plan, PlanRules, resolve
from plait.plan.intervals import ParamLayout
from plait.run import environment, process_group
from plait.state import STATE, ParallelState, layout_of, state_of
from plait.styles import ALL_PARALLEL_STYLES, TensorParallelLayer
from plait.styles.containers import style_of_rest
from plait.styles.params import replicate

TpPlan = Mapping[str, str] | Literal["auto"] | None


def parallelize(
    module: nn.Module,
    config: ParallelismConfig | None = None,
    tp_plan: TpPlan = None,
    *,
    device_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Split a module over the ranks, in place.

    Args:
        module: Any module, with the same weights in memory on every rank, or on the meta device.
        config: The parallel sizes. Default: tensor parallel over all processes.
        tp_plan: Rules, name pattern → style name, which replace or join the module's own (a
            `_tp_plan`, as models of transformers have). None or `"auto"`: the module's own, or
            those of `config`. `{}`: no rule.
        device_mesh: A mesh to use instead of building one: one axis, or one that has an axis named
            `tp`. The sizes in `config` are then not looked at.

    Returns:
        The module itself. Its parameters are DTensors on the axis `tp`, under the same names.
        With one process, or all sizes 1, it is returned as it came.

    Raises:
        LayoutError: The sizes do not fit the processes, heads do not divide, or the module has been
            split before. Nothing has been changed.
        PlanError: The plan cannot be applied; every problem is listed. Nothing has been changed.

    Comm:
        None, except that the first call of a process makes the groups of the mesh.
    """
    if state_of(module) is not None:
        raise LayoutError(
            f"parallelize({type(module).__name__}):",
            "it has been split already",
            "make a new module, or give all sizes in one call",
        )
    config = config if config is not None else _default_config(device_mesh)
    mesh = device_mesh if device_mesh is not None else mesh_for(config)
    if mesh is None:
        return module
    tp_mesh = tp_axis(mesh)
    chosen = tp_plan if tp_plan is not None else getattr(config, "tp_plan", None)
    plan = plan_for(module, chosen, tp_mesh.size())
    check(module, plan, tp_mesh)
    layouts = apply(module, plan, tp_mesh)
    module.__dict__[STATE] = ParallelState(mesh, tp_mesh, plan, layouts, config)
    module.__dict__["_tp_size"] = tp_mesh.size()
    module.__dict__["_tp_plan"] = plan.rules
    if not hasattr(type(module), "tp_plan"):  # models of transformers have properties for these
        module.__dict__["tp_plan"] = plan.rules
        module.__dict__["tp_size"] = tp_mesh.size()
    if is_transformers_model(module):
        adapt(module, module.__dict__[STATE])
    return module


def mesh_for(config: ParallelismConfig, device_type: str | None = None) -> DeviceMesh | None:
    """The mesh for `config` over the processes that there are, or None for a single process.

    Raises:
        LayoutError: The sizes do not fit the number of processes.
    """
    world = environment.world()
    layout = config.resolve(world.num_processes)
    if layout.is_single:
        return None
    device = process_group.ensure(device_type)
    return meshes.build(layout, device.type)


def tp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The tensor-parallel axis of `mesh`: the one named `tp`, or its only one."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return meshes.axis(mesh, "tp") if mesh.ndim > 1 else mesh
    if mesh.ndim == 1:
        return mesh
    raise LayoutError(
        f"device_mesh with the axes {names or mesh.shape}:",
        "none of them is named 'tp'",
        ["name it: init_device_mesh(…, mesh_dim_names=(…, 'tp'))", "pass mesh['your_axis']"],
    )


def plan_for(module: nn.Module, tp_plan: TpPlan = None, num_ranks: int = 1) -> Plan:
    """The plan that `parallelize` would apply.

    Args:
        module: The module, on any device.
        tp_plan: As for `parallelize`.
        num_ranks: Ranks to split over.

    Raises:
        PlanError: It cannot be resolved, or there are no rules at all.
    """
    names = names_of(module)
    own = dict(getattr(module, "_tp_plan", None) or {})
    own = {**missing_rules(module, num_ranks), **own} if own else own
    if isinstance(tp_plan, str) and tp_plan != "auto":
        raise PlanError(
            f"tp_plan={tp_plan!r}:", "it is neither 'auto' nor a dict", "tp_plan='auto'"
        )
    rules = None if tp_plan is None or isinstance(tp_plan, str) else tp_plan
    if rules is None and not own:
        raise PlanError(
            f"Tensor parallelism for {names.model}:",
            "it ships no plan, and none was given",
            [
                "tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'} with its own names",
                "tp_size=1",
            ],
        )
    return resolve(names, own, rules, list(ALL_PARALLEL_STYLES))


def names_of(module: nn.Module) -> ModelNames:
    """Names, classes and shapes of a module, as the plan room wants them."""
    params: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for owner, part in module.named_modules():
        for local_name, param in part.named_parameters(recurse=False):
            name = f"{owner}.{local_name}" if owner else local_name
            params[name], owners[name] = tuple(param.shape), owner
            if id(param) in first:
                tied[name] = first[id(param)]
            else:
                first[id(param)] = name
    prefix = getattr(module, "base_model_prefix", "") or ""
    has_base = bool(prefix) and isinstance(getattr(module, prefix, None), nn.Module)
    return ModelNames(
        modules={
            name: "Embedding" if isinstance(part, nn.Embedding) else type(part).__name__
            for name, part in module.named_modules()
        },
        params=params,
        owners=owners,
        tied=tied,
        base_prefix=prefix if has_base else "",
        model=type(module).__name__,
    )


def check(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Ask every style whether it can do what the plan says, before anything is changed.

    Raises:
        PlanError: A style refuses; all refusals in one message.
        LayoutError: Attention heads do not divide by the size of the axis.
    """
    modules = dict(module.named_modules())
    refusals: list[PlanError] = []
    for entry, style, part, params in _work(modules, plan):
        try:
            if entry.kind == "module":
                style.validate(part, mesh, entry.name)
            for name in params:
                owner = entry.name if entry.kind == "module" else entry.name.rpartition(".")[0]
                full = f"{owner}.{name}" if owner else name
                style.validate_param(part, name, mesh, parameter_name=full)
        except PlanError as refusal:
            refusals.append(refusal)
    if refusals:
        merged = {f"{r.asked} {'; '.join(r.problems)}": None for r in refusals}
        ways = {way: None for r in refusals for way in r.ways_out}
        raise PlanError(
            f"The plan for {type(module).__name__} cannot be applied:", list(merged), list(ways)[:3]
        )
    _check_heads(modules, plan, mesh.size())


def _check_heads(modules: Mapping[str, nn.Module], plan: Plan, num_ranks: int) -> None:
    problems: dict[str, None] = {}
    counts: set[int] = set()
    for entry in plan.entries:
        if entry.kind != "module" or entry.style != "colwise" or "." not in entry.name:
            continue
        parent = modules[entry.name.rpartition(".")[0]]
        head_dim = getattr(parent, "head_dim", None)
        width = getattr(modules[entry.name], "out_features", None)
        if not isinstance(head_dim, int) or not isinstance(width, int) or width % head_dim:
            continue
        num_heads = width // head_dim
        counts.add(num_heads)
        if num_heads % num_ranks:
            rule = entry.rule
            problems[
                f"{rule!r} has {num_heads} heads of {head_dim}: {num_heads} % {num_ranks} ≠ 0"
            ] = None
    if problems:
        fits = [n for n in range(1, max(counts) + 1) if all(c % n == 0 for c in counts)]
        raise LayoutError(
            f"tp_size={num_ranks} would cut through attention heads:",
            list(problems),
            [
                f"tp_size={' or '.join(map(str, fits))}",
                "the style 'replicate' for the attention's projections in tp_plan",
            ],
        )


def apply(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, ParamLayout]:
    """Steps 4 to 6: a loop that decides nothing.

    Returns:
        Parameter name → which index ranges each rank holds.
    """
    modules = dict(module.named_modules())
    cut = _Cutter(mesh)
    by_module: dict[str, TensorParallelLayer] = {}
    for entry, style, part, params in _work(modules, plan):
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


def _work(
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


def _default_config(device_mesh: DeviceMesh | None) -> ParallelismConfig:
    if device_mesh is not None:
        return DistributedConfig(tp_size=tp_axis(device_mesh).size())
    world = environment.world()
    return DistributedConfig(tp_size=world.world_size if world.launched else 1)


__all__ = ["PlanRules", "parallelize", "plan_for"]
