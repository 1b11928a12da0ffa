"""Parallel styles: how one module is cut and what happens at its border."""

from plait.styles.embedding import EmbeddingParallel
from plait.styles.experts import MoeExpertsParallel, MoeIdentityParallel
from plait.styles.fused import HeadsColwiseParallel
from plait.styles.head_params import HeadEmbedding, HeadParams
from plait.styles.layer import TensorParallelLayer
from plait.styles.linear import ColwiseParallel, RowwiseParallel
from plait.styles.mla import MlaKvAProjParallel
from plait.styles.packed import PackedColwiseParallel, PackedRowwiseParallel
from plait.styles.registry import ALL_PARALLEL_STYLES, ParallelInterface
from plait.styles.statistics import SplitNorm, SplitStatistics
from plait.styles.whole import (
    AllReduceParallel,
    LocalParamsParallel,
    ReplicatedWithGradAllReduce,
    ReplicateParallel,
    SequenceParallel,
)

__all__ = [
    "ALL_PARALLEL_STYLES",
    "AllReduceParallel",
    "ColwiseParallel",
    "EmbeddingParallel",
    "HeadEmbedding",
    "HeadParams",
    "HeadsColwiseParallel",
    "LocalParamsParallel",
    "MlaKvAProjParallel",
    "MoeExpertsParallel",
    "MoeIdentityParallel",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ParallelInterface",
    "ReplicateParallel",
    "ReplicatedWithGradAllReduce",
    "RowwiseParallel",
    "SequenceParallel",
    "SplitNorm",
    "SplitStatistics",
    "TensorParallelLayer",
]
