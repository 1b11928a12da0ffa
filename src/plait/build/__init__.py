"""The ordered composition: what happens to a module, and why in that order (`compose`)."""

from plait.build.axes import tp_axis
from plait.build.checks import check
from plait.build.compose import mesh_for, parallelize, plan_for, sequence_axes_for
from plait.build.rules import DerivedPlan, derive_plan
from plait.build.sharing import use_attention

__all__ = [
    "DerivedPlan",
    "check",
    "derive_plan",
    "mesh_for",
    "parallelize",
    "plan_for",
    "sequence_axes_for",
    "use_attention",
    "tp_axis",
]
