"""Which rules a module is split by: those it ships, those found from its structure, the user's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from plait.build.names import names_of
from plait.errors import PlanError
from plait.plan import ModelNames, PlanRules
from plait.plan.derive import derive

TpPlan = Mapping[str, str] | Literal["auto", "model"] | None


class DerivedPlan(PlanRules):
    """Rules found from a module's structure, an ordinary `dict[str, str]`.

    Handed to `parallelize` as it is, it is proven before it is used; a copy of it as a plain dict,
    or one that was changed, counts as rules of the user's.

    Attributes:
        whole: Pattern → why this part stays whole on every rank.
    """

    def __init__(self, rules: Mapping[str, str], whole: Mapping[str, str]) -> None:
        super().__init__(rules)
        self.whole = dict(whole)

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
    """

    shipped: Mapping[str, str]
    derived: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def merged(self) -> dict[str, str]:
        """Shipped rules, improved and completed by derived ones."""
        return {**self.shipped, **self.derived}

    @property
    def is_general(self) -> bool:
        """Whether no derived rule names a single layer by its number."""
        return not any(part.isdigit() for pattern in self.derived for part in pattern.split("."))

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
    if isinstance(tp_plan, DerivedPlan):
        return Rules({}, tp_plan, tp_plan.whole)
    if not shipped and tp_plan is not None and tp_plan != "auto":
        return Rules(shipped)  # a module without a plan: the user's rules are the whole of it
    found = derive(names)
    return Rules(shipped, _improvements(shipped, found.rules), found.whole)


def _shipped(module: nn.Module) -> Mapping[str, str]:
    plan: Any = getattr(module, "_tp_plan", None)
    return plan or {}


def _improvements(shipped: Mapping[str, str], derived: Mapping[str, str]) -> dict[str, str]:
    """Derived rules that say something else than the shipped ones."""
    return {pattern: style for pattern, style in derived.items() if shipped.get(pattern) != style}
