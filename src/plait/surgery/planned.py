"""What the plan says of modules that were put in later, and whether they can do it."""

from collections.abc import Mapping

from torch import nn

from plait.errors import PlanError
from plait.plan import Entry
from plait.state import ParallelState
from plait.styles import ALL_PARALLEL_STYLES, TensorParallelLayer
from plait.styles.heads import cut_of, set_cut
from plait.styles.mla import ROPE_DIM
from plait.styles.params import CUTS
from plait.surgery.loading import is_part
from plait.surgery.watching import plain_parameters
from plait.surgery.wrappers import Wrapped

_WHOLE_BORDERS = frozenset(
    {
        "colwise_gather_output",
        "colwise_rep",
        "rowwise_split_input",
        "rowwise_rep",
        "embedding_rowwise",
        "embedding_colwise",
        "replicate",
    }
)
"""Styles that take a whole tensor and give one: another module in the place may stay whole."""


def planned_styles(
    asked: str, model: nn.Module, state: ParallelState, wrapped: Wrapped
) -> dict[str, TensorParallelLayer]:
    """The styles of the modules that the plan names, if it holds for those that are new.

    Args:
        asked: For messages.
        model: The root of what was split.
        state: How it was.
        wrapped: The modules that others have put around layers.

    Returns:
        Module name, as it is now → its style.

    Raises:
        PlanError: A new module cannot do what the plan says of its place.
    """
    now = dict(model.named_modules())
    modules = {name: now[place] for name, place in wrapped.places.items()}
    touched = {name.rpartition(".")[0] for name in plain_parameters(model)}
    touched = {name for name, place in wrapped.places.items() if place in touched}
    told = _mark(modules, state)
    found: dict[str, TensorParallelLayer] = {}
    problems: dict[str, None] = {}
    for entry in state.plan.entries:
        part = modules.get(entry.name) if entry.kind == "module" else None
        if part is None:
            continue
        style = ALL_PARALLEL_STYLES[entry.style]
        if is_part(part) and entry.name not in touched:
            found[entry.name] = style
            continue
        problem = _refusal(entry, style, part, state)
        if problem is None:
            found[entry.name] = style
        elif is_part(part) or entry.style not in _WHOLE_BORDERS:
            problems[f"{entry.name} ({type(part).__name__}): {problem}"] = None
    if problems:
        for part in told:
            part.__dict__.pop(CUTS, None)
        raise PlanError(
            asked,
            list(problems),
            ["put it in before the model is split", "change the plan: 'replicate' for what is cut"],
        )
    return {wrapped.places[name]: style for name, style in found.items()}


def _mark(modules: Mapping[str, nn.Module], state: ParallelState) -> list[nn.Module]:
    """Tell new modules what the plan says of the heads in their place; returns those told."""
    told: list[nn.Module] = []
    for name, cut in state.plan.cuts.items():
        owner, key = (name, "") if name in modules else (name.rpartition(".")[::2])
        part = modules.get(owner)
        if part is not None and (part in told or CUTS not in part.__dict__):
            set_cut(part, key, cut, state.tp_mesh)
            told.append(part)
    for name, size in state.plan.rope_dims.items():
        if name in modules:
            modules[name].__dict__.setdefault(ROPE_DIM, size)
    return told


def _refusal(
    entry: Entry, style: TensorParallelLayer, part: nn.Module, state: ParallelState
) -> str | None:
    cut = cut_of(part)
    weight = part._parameters.get("weight")
    if cut is not None and weight is not None and cut.cut.size not in weight.shape:
        return f"its weight is {tuple(weight.shape)}, what was here had {cut.cut.size} features"
    try:
        style.validate(part, state.tp_mesh, entry.name)
        for name in part._parameters:
            style.validate_param(part, name, state.tp_mesh, parameter_name=f"{entry.name}.{name}")
    except PlanError as refused:
        return "; ".join(refused.problems)
    return None


def single_style(state: ParallelState, owner: str, name: str) -> TensorParallelLayer | None:
    """The style of one parameter that a rule names by itself."""
    full = f"{owner}.{name}" if owner else name
    for entry in state.plan.entries:
        if entry.kind == "param" and entry.name == full:
            return ALL_PARALLEL_STYLES[entry.style]
    return None
