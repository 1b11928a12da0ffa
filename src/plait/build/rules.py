"""Which rules a module is split by: those it ships, those found from its structure, the user's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from plait.build.names import names_of
from plait.errors import PlanError
from plait.plan import ModelNames, PlanRules
from plait.plan.derive import derive
from plait.plan.rules import generalize

TpPlan = Mapping[str, str] | Literal["auto", "model"] | None


class DerivedPlan(PlanRules):
    """Rules found from a module's structure, an ordinary `dict[str, str]`.

    Handed to `parallelize` as it is, it is proven before it is used; a copy of it as a plain dict
    (`plan | {…}` is one), or one that was changed, counts as rules of the user's.

    Attributes:
        whole: Pattern → why this part stays whole on every rank.
    """

    def __init__(self, rules: Mapping[str, str], whole: Mapping[str, str]) -> None:
        super().__init__(rules)
        self.whole = dict(whole)
        self._found = dict(rules)

    @property
    def is_changed(self) -> bool:
        """Whether its rules are not those any more that were found."""
        return dict(self) != self._found

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.whole:
            width = max(len(pattern) for pattern in self.whole)
            parts.append("whole on every rank:")
            parts += [f"{pattern:<{width}}  {why}" for pattern, why in self.whole.items()]
        return "\n".join(parts)


def derive_plan(module: nn.Module) -> DerivedPlan:
    """A tensor-parallel plan from the structure of a module that ships none.

    Found are attention (separate, fused and low-rank projections), MLPs, embeddings and heads, and
    what lies between their layers, from names, shapes, module order and the counts of heads in
    modules and configs. What is not recognised stays whole, with a reason. Nothing is run: the plan
    is proven when it is used (`parallelize`), or by `plait check`.

    Args:
        module: A model of transformers or any other module, on any device.

    Returns:
        The rules, to be passed as `tp_plan`; they print as a table.

    Comm: none.
    """
    found = derive(names_of(module))
    return DerivedPlan(found.rules, found.whole)


@dataclass(frozen=True)
class Rules:
    """The rules of a module before the user's.

    Attributes:
        shipped: Pattern → style, as the module ships them.
        derived: Pattern → style that the module's structure gives and that is not shipped alike.
        whole: Pattern → why this part stays whole.
        is_own: Whether `derived` is what is found for this very module, with nothing left out.
    """

    shipped: Mapping[str, str]
    derived: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False

    @property
    def merged(self) -> dict[str, str]:
        """Shipped rules, improved and completed by derived ones."""
        return {**self.shipped, **self.derived}

    @property
    def is_general(self) -> bool:
        """Whether no derived rule names a single layer by its number."""
        return not any(part.isdigit() for pattern in self.derived for part in pattern.split("."))

    def without(self, patterns: Collection[str], why: str) -> "Rules":
        """These rules without some derived ones, and without the rest of the parts they are of.

        Args:
            patterns: Patterns with `*` for every number. What lies beside one of them in the same
                module below the root goes with it: half an attention is worse than none.
            why: Why these parts stay whole.
        """
        parts = {pattern.rpartition(".")[0] for pattern in patterns} - {""}
        gone = {
            pattern
            for pattern in self.derived
            if generalize(pattern) in patterns or generalize(pattern).rpartition(".")[0] in parts
        }
        if not gone:
            return self
        kept = {pattern: style for pattern, style in self.derived.items() if pattern not in gone}
        return Rules(self.shipped, kept, {**self.whole, **dict.fromkeys(sorted(gone), why)})

    @property
    def reasons(self) -> list[str]:
        """What stays whole and why, for a message."""
        return [f"{pattern}: {why}" for pattern, why in list(self.whole.items())[:8]]


def rules_for(module: nn.Module, names: ModelNames, tp_plan: TpPlan) -> Rules:
    """The rules that a plan starts from.

    Args:
        module: The module.
        names: Its names.
        tp_plan: `"model"`: those it ships alone. A dict for a module that ships none: none.
            Otherwise derived ones as well.

    Raises:
        PlanError: There are none, or `tp_plan` is no plan.
    """
    shipped = dict(_shipped(module))
    if isinstance(tp_plan, str) and tp_plan not in ("auto", "model"):
        raise PlanError(
            f"tp_plan={tp_plan!r}:",
            "it is neither 'auto' nor 'model' nor a dict",
            ["tp_plan='auto'", "tp_plan='model', the plan that the model ships as it stands"],
        )
    if tp_plan == "model":
        if not shipped:
            raise PlanError(
                f"tp_plan='model' for {names.model}:",
                "it ships no plan",
                ["tp_plan='auto': a plan is derived from the model's structure", "rules of yours"],
            )
        return Rules(shipped)
    user = user_rules(tp_plan)
    if not shipped and user is not None:
        return Rules(shipped)  # a module without a plan: the user's rules are the whole of it
    found = derive(names)
    if isinstance(tp_plan, DerivedPlan) and user is None:
        return Rules({}, dict(tp_plan), tp_plan.whole, is_own=tp_plan == found.rules)
    return Rules(shipped, _improvements(shipped, found.rules), found.whole, is_own=True)


def user_rules(tp_plan: TpPlan) -> Mapping[str, str] | None:
    """The user's own rules in a `tp_plan`, or None where it holds none."""
    if isinstance(tp_plan, DerivedPlan):
        return dict(tp_plan) if tp_plan.is_changed else None
    return None if tp_plan is None or isinstance(tp_plan, str) else tp_plan


def _shipped(module: nn.Module) -> Mapping[str, str]:
    plan: Any = getattr(module, "_tp_plan", None)
    return plan or {}


def _improvements(shipped: Mapping[str, str], derived: Mapping[str, str]) -> dict[str, str]:
    """Derived rules that say something else than the shipped ones."""
    return {pattern: style for pattern, style in derived.items() if shipped.get(pattern) != style}
