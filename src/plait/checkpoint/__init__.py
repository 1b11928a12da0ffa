"""Checkpoints of a training: saved by any layout, read by any other, all or nothing."""

from plait.checkpoint.background import Saving
from plait.checkpoint.folders import latest
from plait.checkpoint.loading import Loaded, load
from plait.checkpoint.saving import save

__all__ = ["Loaded", "Saving", "latest", "load", "save"]
