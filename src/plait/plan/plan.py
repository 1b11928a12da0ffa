"""Rules become a plan: concrete names, each with a style, before anything is read or cut."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from plait.errors import PlanError
from plait.plan.cuts import Cut
from plait.plan.heads import Attention, HeadMap
from plait.plan.names import ModelNames
from plait.plan.rules import full_pattern, generalize, matches, merge, specificity
from plait.plan.tied import TiedUse, agree


@dataclass(frozen=True)
class Entry:
    """One decision: this module (or this parameter) has this style.

    Attributes:
        name: Concrete name, `model.layers.3.mlp.up_proj`.
        kind: `"module"`: the style cuts the module's own parameters and changes its forward.
            `"param"`: the style cuts this parameter only.
        style: Name in the registry of styles.
        rule: The pattern that decided it.
        origin: `"model"` (its shipped plan), `"user"`, `"derived"` (found from the model's
            structure), or `"tied"` (follows a tied weight).
    """

    name: str
    kind: Literal["module", "param"]
    style: str
    rule: str
    origin: Literal["model", "user", "tied", "derived"]


class PlanRules(dict[str, str]):
    """A plan as rules: an ordinary `dict[str, str]` that prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "(no rules: every parameter stays whole on every rank)"
        width = max(len(pattern) for pattern in self)
        return "\n".join(f"{pattern:<{width}}  {style}" for pattern, style in self.items())


@dataclass(frozen=True)
class Plan:
    """Every decision about one model, comparable and printable; applying it decides nothing more.

    Attributes:
        entries: One per module or parameter that a rule names, in model order.
        rules: The merged rules they came from.
        attention: Module name → heads, for every attention that is split; empty until the number of
            ranks is known ([`with_heads`][plait.plan.attention.with_heads]).
        cuts: Entry name → how its split dimension lies on the ranks, where that is made of heads.
        rope_dims: Entry name → features of the rotary key, for multi-head latent attention.
        whole: Pattern → why this part stays whole on every rank, where the plan was derived.
    """

    entries: tuple[Entry, ...]
    rules: PlanRules
    attention: Mapping[str, Attention] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    rope_dims: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def heads(self) -> dict[str, HeadMap]:
        """Attention module → which rank has which heads."""
        return {name: found.heads for name, found in self.attention.items()}

    def by_style(self) -> dict[str, list[str]]:
        """Style → the names that have it."""
        styles: dict[str, list[str]] = {}
        for entry in self.entries:
            styles.setdefault(entry.style, []).append(entry.name)
        return styles

    def __str__(self) -> str:
        rows = [(generalize(e.name), e.style, e.origin) for e in self.entries]
        rows.sort()
        lines = []
        for (pattern, style, origin), group in groupby(rows):
            lines.append((pattern, style, origin, len(list(group))))
        if not lines:
            return str(PlanRules())
        width = max(len(line[0]) for line in lines)
        return "\n".join(f"{p:<{width}}  {s:<24} {o:<6} × {n}" for p, s, o, n in lines)


def resolve(
    names: ModelNames,
    own_rules: Mapping[str, str],
    user_rules: Mapping[str, str] | None,
    styles: Collection[str],
    derived: Collection[str] = (),
) -> Plan:
    """Merge the model's rules with the user's and turn them into concrete entries.

    Args:
        names: The model.
        own_rules: Rules that the model ships. One that matches nothing is dropped: shipped plans
            name parts that a given config does not have (a dense model's experts).
        user_rules: None: the model's own. `{}`: no rule at all. Otherwise single rules that
            replace or join the model's; names may be relative to the base model.
        styles: Names of all known styles.
        derived: Patterns of `own_rules` that were found from the model's structure.

    Returns:
        The plan, entries in model order.

    Raises:
        PlanError: A user's rule matches nothing, a style is unknown, or two tied weights are cut in
            two ways. All problems are listed, each with the closest real names.
    """
    all_names = list(names.modules) + list(names.params)
    problems: list[str] = []
    user: dict[str, str] = {}
    for pattern, style in (user_rules or {}).items():
        wrong = type_problems(pattern, style)
        if wrong:
            problems += wrong
            continue
        full = full_pattern(pattern, all_names, names.base_prefix)
        if full is None:
            problems.append(_unmatched(pattern, all_names))
        user[full or pattern] = style
    rules = dict(own_rules) if user_rules is None else merge(own_rules, user)
    for pattern, style in rules.items():
        if style not in styles:
            problems.append(_unknown_style(pattern, style, styles))
    if problems:
        raise PlanError(
            f"The plan for {names.model} cannot be applied:",
            problems,
            [
                "use names that model.named_modules() shows, with * for layer numbers",
                f"choose a style from: {', '.join(sorted(styles))}",
                "register your own: ALL_PARALLEL_STYLES.register(name, style)",
            ],
        )
    entries = _promote(names, _entries(names, rules, user, derived))
    return Plan(_follow_ties(names, entries), PlanRules(rules))


def type_problems(pattern: object, style: object) -> list[str]:
    """What is wrong with the types of one rule."""
    if isinstance(pattern, str) and isinstance(style, str):
        return []
    return [f"rule {pattern!r}: {style!r} is not a pair of strings (name pattern: style name)"]


def _entries(
    names: ModelNames,
    rules: Mapping[str, str],
    user: Mapping[str, str],
    derived: Collection[str],
) -> dict[str, Entry]:
    ordered = sorted(rules, key=specificity)  # the most specific rule is written last and stays
    kinds: list[tuple[Literal["module", "param"], Sequence[str]]] = [
        ("module", list(names.modules)),
        ("param", list(names.params)),
    ]
    origins: dict[str, Literal["user", "model", "derived"]] = {
        pattern: "user" if pattern in user else "derived" if pattern in derived else "model"
        for pattern in rules
    }
    entries: dict[str, Entry] = {}
    for kind, known in kinds:
        by_pattern: dict[str, list[str]] = {}
        for name in known:
            by_pattern.setdefault(generalize(name), []).append(name)
        for pattern in ordered:
            if pattern == generalize(pattern):
                hits = by_pattern.get(pattern, [])
            else:
                hits = [name for name in known if matches(pattern, name)]
            for name in hits:
                entries[name] = Entry(name, kind, rules[pattern], pattern, origins[pattern])
    position = {name: n for n, name in enumerate([*names.modules, *names.params])}
    return dict(sorted(entries.items(), key=lambda item: position[item[0]]))


_WITH_FORWARD = ("Linear", "Embedding")
"""Classes whose styles act at their forward: a rule on a parameter of one means the module."""


def _promote(names: ModelNames, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Make rules on the parameters of linear layers and embeddings rules on the modules.

    Also drops a shipped rule on a parameter whose module the user wants whole.

    Raises:
        PlanError: Two rules give one such module two styles.
    """
    kept: dict[str, Entry] = {}
    problems = []
    for name, entry in entries.items():
        owner = names.owners.get(name, "") if entry.kind == "param" else ""
        above = entries.get(owner) if entry.kind == "param" else None
        wanted_whole = above is not None and above.style == "replicate" and above.origin == "user"
        if wanted_whole and entry.origin in ("model", "derived"):
            continue
        if entry.kind == "module" or names.modules[owner] not in _WITH_FORWARD:
            kept[name] = entry
            continue
        other = above or kept.get(owner)
        if other is None:
            kept[owner] = Entry(owner, "module", entry.style, entry.rule, entry.origin)
        elif other.style != entry.style:
            problems.append(
                f"rule {entry.rule!r} says {entry.style!r}, but {other.rule!r} says "
                f"{other.style!r}: {owner!r} has one forward"
            )
    if problems:
        raise PlanError(
            f"The plan for {names.model} gives one layer two styles:",
            list(dict.fromkeys(problems)),
            ["name the module, not its parameters", "register a style of your own"],
        )
    position = {name: n for n, name in enumerate([*names.modules, *names.params])}
    return dict(sorted(kept.items(), key=lambda item: position[item[0]]))


def _follow_ties(names: ModelNames, entries: dict[str, Entry]) -> tuple[Entry, ...]:
    groups: dict[str, list[str]] = {}
    for name, first in names.tied.items():
        groups.setdefault(first, [first]).append(name)
    problems = []
    for params in groups.values():
        uses = [_use_of(names, entries, p) for p in params if _has_forward(names, p)]
        changes, problem = agree(uses)
        if problem:
            problems.append(problem)
        for module, style in changes.items():
            rule = next((u.module for u in uses if u.module != module and u.style), module)
            entries[module] = Entry(module, "module", style, rule, "tied")
        cut = next((entries[u.module] for u in uses if u.module in entries), None)
        for param in params:  # held by a module that only keeps it (a head's bias)
            if cut is not None and not _has_forward(names, param) and param not in entries:
                entries[param] = Entry(param, "param", cut.style, cut.name, "tied")
    if problems:
        raise PlanError(
            f"The plan for {names.model} cuts a tied weight in two ways:",
            problems,
            ["name only one of the two modules: the other follows", "untie the weights"],
        )
    return tuple(entries.values())


def _has_forward(names: ModelNames, param: str) -> bool:
    """Whether a parameter's module is one whose style acts at its forward."""
    return names.modules[names.owners[param]] in (*_WITH_FORWARD, "Conv1D")


def _use_of(names: ModelNames, entries: Mapping[str, Entry], param: str) -> TiedUse:
    module = names.owners[param]
    entry = entries.get(module)
    return TiedUse(
        module=module,
        is_embedding="embed" in names.modules[module].lower(),
        style=entry.style if entry else None,
        explicit=entry is not None and entry.origin == "user",
    )


def _unmatched(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, {generalize(n) for n in names}, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1]
    near += sorted({generalize(n) for n in names if n.rsplit(".", 1)[-1] == last} - set(near))[:2]
    closest = f"; closest names: {', '.join(near)}" if near else ""
    return f"rule {pattern!r} matches no module and no parameter{closest}"


def _unknown_style(pattern: str, style: str, styles: Collection[str]) -> str:
    near = difflib.get_close_matches(style, list(styles), n=2, cutoff=0.5)
    meant = f"; closest styles: {', '.join(near)}" if near else ""
    return f"rule {pattern!r} names the unknown style {style!r}{meant}"
