"""Which rules a module is split by: those it ships, those found from its structure, the user's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from plait.errors import PlanError
from plait.plan import ModelNames
from plait.plan.derive import derive

TpPlan = Mapping[str, str] | Literal["auto", "model"] | None


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
