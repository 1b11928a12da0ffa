"""The ordered composition: what happens to a module, and why in that order (`compose`)."""

from plait.build.checks import check
from plait.build.compose import mesh_for, parallelize, plan_for, tp_axis

__all__ = ["check", "mesh_for", "parallelize", "plan_for", "tp_axis"]
