"""Training over any layout: loaders, accumulation, trackers, and `Accelerator` in front of them."""

from plait.run.seeds import set_all as set_seed
from plait.train.accelerator import Accelerator
from plait.train.accumulation import Window, no_sync
from plait.train.loader import DataRankLoader, data_loader, skip_first_batches
from plait.train.places import Places, places_for, places_on
from plait.train.sequence_loader import SequenceParallelLoader
from plait.train.sequence_sums import sequence_sum
from plait.train.sequences import SplitBatch, SplitRules, axes_of, split_batch
from plait.train.settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from plait.train.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

UlyssesSPDataLoaderAdapter = SequenceParallelLoader
"""The name that accelerate has for it."""

__all__ = [
    "Accelerator",
    "DataLoaderConfiguration",
    "DataRankLoader",
    "GradientAccumulationPlugin",
    "JsonlTracker",
    "Places",
    "ProjectConfiguration",
    "SequenceParallelLoader",
    "SplitBatch",
    "SplitRules",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "UlyssesSPDataLoaderAdapter",
    "Window",
    "axes_of",
    "data_loader",
    "no_sync",
    "places_for",
    "places_on",
    "sequence_sum",
    "set_seed",
    "skip_first_batches",
    "split_batch",
]
