"""Each rank's byte ranges in and out of checkpoints; how parameters are made of stored tensors."""

from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.loading import LoadReport, load, mismatches
from plait.weights.module_store import ModuleStore
from plait.weights.outcome import together
from plait.weights.recipes import (
    Concat,
    Evaluation,
    Map,
    Narrow,
    Opaque,
    Recipe,
    Regroup,
    Select,
    Source,
    Stack,
    Transpose,
    Unsqueeze,
)
from plait.weights.saving import SaveReport, save
from plait.weights.store import TensorStore

__all__ = [
    "Checkpoint",
    "Concat",
    "Evaluation",
    "LoadReport",
    "Map",
    "ModuleStore",
    "Narrow",
    "Opaque",
    "Recipe",
    "Regroup",
    "SaveReport",
    "Select",
    "Source",
    "Stack",
    "TensorStore",
    "Transpose",
    "Unsqueeze",
    "load",
    "mismatches",
    "open_checkpoint",
    "save",
    "together",
]
