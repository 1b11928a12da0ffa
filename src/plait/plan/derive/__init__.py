"""A plan from the structure of a model: `derive` recognises the parts, one file for each kind."""

from plait.plan.derive.structure import Derived, derive

__all__ = ["Derived", "derive"]
