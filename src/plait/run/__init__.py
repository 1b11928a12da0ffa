"""The process and its surroundings: environment, process group, device, seeds, reports."""

from plait.run.environment import World, world

__all__ = ["World", "world"]
