"""Rules → plan: which module has which style and which rank owns which index ranges.

No torch here: a plan is data that can be printed, saved and compared before any process group
exists.
"""

from plait.plan.names import ModelNames
from plait.plan.plan import Entry, Plan, PlanRules, resolve
from plait.plan.rules import generalize, matches, merge

__all__ = [
    "Entry",
    "ModelNames",
    "Plan",
    "PlanRules",
    "generalize",
    "matches",
    "merge",
    "resolve",
]
