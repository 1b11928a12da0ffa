"""A guard that checks, while a program runs, that the ranks of a split model do the same."""

from plait.consistency.guarding import Guard, guard

__all__ = ["Guard", "guard"]
