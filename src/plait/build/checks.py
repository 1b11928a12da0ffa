"""What would go wrong with a plan, found before anything is changed."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.build.apply import mark_cuts, work
from plait.errors import LayoutError, PlanError
from plait.plan import Plan, roles
from plait.plan.tied import CUT_DIM
from plait.styles.params import CUTS


def check(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Ask every style whether it can do what the plan says, before anything is changed.

    Raises:
        PlanError: A style refuses; all refusals in one message.
        LayoutError: Attention heads do not divide by the size of the axis.
    """
    modules = dict(module.named_modules())
    mark_cuts(modules, plan, mesh)  # styles look at where heads end
    try:
        refusals = list(_refusals(modules, plan, mesh))
    finally:
        for part in modules.values():
            part.__dict__.pop(CUTS, None)
    if refusals:
        merged = {f"{r.asked} {'; '.join(r.problems)}": None for r in refusals}
        ways = {way: None for r in refusals for way in r.ways_out}
        raise PlanError(
            f"The plan for {type(module).__name__} cannot be applied:", list(merged), list(ways)[:3]
        )
    _check_heads(modules, plan, mesh.size())


def _refusals(
    modules: Mapping[str, nn.Module], plan: Plan, mesh: DeviceMesh
) -> Iterator[PlanError]:
    for entry, style, part, params in work(modules, plan):
        try:
            if entry.kind == "module":
                style.validate(part, mesh, entry.name)
            for name in params:
                owner = entry.name if entry.kind == "module" else entry.name.rpartition(".")[0]
                full = f"{owner}.{name}" if owner else name
                style.validate_param(part, name, mesh, parameter_name=full)
        except PlanError as refusal:
            yield refusal


_WHOLE_OUTPUT = frozenset(CUT_DIM) - {"colwise"}
"""Styles whose modules hand on whole tensors, whatever they cut."""


def _check_heads(modules: Mapping[str, nn.Module], plan: Plan, num_ranks: int) -> None:
    problems: dict[str, None] = {}
    counts: set[int] = set()
    for entry in plan.entries:
        if entry.kind != "module" or entry.name in plan.cuts or "." not in entry.name:
            continue
        if roles.role(entry.name, "") not in ("q", "k", "v") or entry.style in _WHOLE_OUTPUT:
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
