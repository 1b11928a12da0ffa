"""Which axes exist, how many ranks lie along each, and whether that fits. Knows no torch."""

from plait.layout.arithmetic import Layout, factors
from plait.layout.axes import AXES, UNBUILT
from plait.layout.config import (
    DeepSpeedSequenceParallelConfig,
    DistributedConfig,
    ParallelismConfig,
    SequenceParallelConfig,
)

__all__ = [
    "AXES",
    "UNBUILT",
    "DeepSpeedSequenceParallelConfig",
    "DistributedConfig",
    "Layout",
    "ParallelismConfig",
    "SequenceParallelConfig",
    "factors",
]
