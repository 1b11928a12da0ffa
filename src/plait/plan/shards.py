"""Which modules FSDP gathers and frees as one: the groups of sharded data parallelism, as data.

A group's parameters are gathered before its module's forward and, with `free_full_weight`, dropped
after it and gathered again for the backward. What belongs to no group belongs to the root.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import PlanError
from plait.plan.names import ModelNames
from plait.plan.rules import full_pattern, generalize, matches, specificity

FREE = "free_full_weight"
KEEP = "keep_full_weight"
ROOT = "root"
SHARD_STYLES = (FREE, KEEP, ROOT)
"""Styles of a sharding plan: drop the gathered weights after the forward; keep them until the
backward; no group of its own (part of the group around it)."""

_LISTS = ("ModuleList", "Sequential")
_CONTAINERS = ("ModuleList", "ModuleDict")  # have no forward


@dataclass(frozen=True)
class ShardGroup:
    """One module whose parameters are gathered together.

    Attributes:
        name: The module.
        style: `free_full_weight` or `keep_full_weight`.
        rule: The pattern that named it.
    """

    name: str
    style: str
    rule: str


def blocks_of(names: ModelNames) -> list[str]:
    """The outermost members of module lists that have parameters: the layers of a model."""
    found: list[str] = []
    for name, kind in names.modules.items():
        parent, _, last = name.rpartition(".")
        is_member = last.isdigit() and names.modules.get(parent) in _LISTS
        is_member = is_member and kind not in _CONTAINERS  # of it the members, if it is a list
        inside = any(name.startswith(f"{block}.") for block in found)
        if is_member and not inside and _params_below(names, name):
            found.append(name)
    return found


def shard_groups(
    names: ModelNames,
    rules: Mapping[str, str] | None = None,
    ends: Sequence[str] = (),
) -> list[ShardGroup]:
    """The groups of a model, inner ones first.

    By default every layer is a group, and so are an embedding and a head that share no weight.

    Args:
        names: The model.
        rules: Pattern → style, which replace or join the default ones. None or `{}`: only those.
        ends: Names of the embedding and the head, where they are known.

    Raises:
        PlanError: A rule matches no module, names an unknown style, or makes a group of a module
            whose parameters another group holds too.
    """
    default = {generalize(name): FREE for name in blocks_of(names)}
    default |= {name: FREE if n == 0 else KEEP for n, name in enumerate(ends)}
    user = _checked(names, rules or {})
    styles = {pattern: style for pattern, style in default.items() if pattern not in user} | user
    chosen: dict[str, ShardGroup] = {}
    for pattern in sorted(styles, key=specificity):
        for name in names.modules:
            if name and matches(pattern, name) and _params_below(names, name):
                chosen[name] = ShardGroup(name, styles[pattern], pattern)
    groups = [group for group in chosen.values() if group.style != ROOT]
    _refuse_shared(names, [group for group in groups if group.rule in user])
    groups = [group for group in groups if not _shared(names, group.name)]
    return sorted(groups, key=lambda group: -group.name.count("."))


def _checked(names: ModelNames, rules: Mapping[str, str]) -> dict[str, str]:
    problems, found = [], {}
    for pattern, style in rules.items():
        full = full_pattern(pattern, names.modules, names.base_prefix)
        if full is None:
            known = {generalize(name) for name in names.modules if name}
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
            hint = f"; closest names: {', '.join(near)}" if near else ""
            problems.append(f"rule {pattern!r} matches no module{hint}")
        if style not in SHARD_STYLES:
            near = difflib.get_close_matches(style, SHARD_STYLES, n=1, cutoff=0.4)
            hint = f"; closest: {near[0]}" if near else ""
            problems.append(f"rule {pattern!r} names the unknown style {style!r}{hint}")
        found[full or pattern] = style
    if problems:
        raise PlanError(
            f"The sharding plan (fsdp_plan) for {names.model} cannot be applied:",
            problems,
            [
                "use names that model.named_modules() shows, with * for layer numbers",
                f"choose a style from: {', '.join(SHARD_STYLES)}",
                "fsdp_plan=None: every layer is gathered by itself",
            ],
        )
    return found


def _refuse_shared(names: ModelNames, groups: Sequence[ShardGroup]) -> None:
    problems = [
        f"rule {group.rule!r}: {shared[0]} is the same parameter as {shared[1]}, outside of it"
        for group in groups
        if (shared := _shared(names, group.name))
    ]
    if problems:
        raise PlanError(
            f"The sharding plan (fsdp_plan) for {names.model} cannot be applied:",
            problems,
            ["leave the rule out: the root gathers what is shared", "untie the weights"],
        )


def _params_below(names: ModelNames, module: str) -> list[str]:
    return [param for param in names.params if param.startswith(f"{module}.")]


def _shared(names: ModelNames, module: str) -> tuple[str, str] | None:
    """A parameter of a module that lies outside of it too, under both names."""
    for name, first in names.tied.items():
        if name.startswith(f"{module}.") != first.startswith(f"{module}."):
            return (name, first) if name.startswith(f"{module}.") else (first, name)
    return None
