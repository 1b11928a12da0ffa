"""One PyTorch or Hugging Face model on many devices: one mesh, one config, one call.

Names are imported on first use, so that `import plait` costs milliseconds and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait import checkpoint, loss, styles
    from plait.auto import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
        AutoModelForQuestionAnswering,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForSpeechSeq2Seq,
        AutoModelForTokenClassification,
    )
    from plait.build import DerivedPlan, derive_plan, parallelize, use_attention
    from plait.consistency import Guard, guard
    from plait.errors import (
        CheckpointError,
        LayoutError,
        PlaitError,
        PlanError,
        RankError,
        WeightsError,
    )
    from plait.layout import (
        DeepSpeedSequenceParallelConfig,
        DistributedConfig,
        ParallelismConfig,
        SequenceParallelConfig,
    )
    from plait.state import full_grads, full_state_dict, gathered, held_fraction
    from plait.styles import ALL_PARALLEL_STYLES, ParallelInterface, TensorParallelLayer
    from plait.surgery import adopt
    from plait.train import (
        Accelerator,
        SequenceParallelLoader,
        UlyssesSPDataLoaderAdapter,
        sequence_sum,
        split_batch,
    )

__version__ = "0.1.0"

_HOMES = {
    "plait.auto": (
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForMaskedLM",
        "AutoModelForQuestionAnswering",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSequenceClassification",
        "AutoModelForSpeechSeq2Seq",
        "AutoModelForTokenClassification",
    ),
    "plait.build": ("DerivedPlan", "derive_plan", "parallelize", "use_attention"),
    "plait.consistency": ("Guard", "guard"),
    "plait.errors": (
        "CheckpointError",
        "LayoutError",
        "PlaitError",
        "PlanError",
        "RankError",
        "WeightsError",
    ),
    "plait.layout": (
        "DeepSpeedSequenceParallelConfig",
        "DistributedConfig",
        "ParallelismConfig",
        "SequenceParallelConfig",
    ),
    "plait.state": ("full_grads", "full_state_dict", "gathered", "held_fraction"),
    "plait.styles": ("ALL_PARALLEL_STYLES", "ParallelInterface", "TensorParallelLayer"),
    "plait.surgery": ("adopt",),
    "plait.train": (
        "Accelerator",
        "SequenceParallelLoader",
        "UlyssesSPDataLoaderAdapter",
        "sequence_sum",
        "split_batch",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ALL_PARALLEL_STYLES",
    "Accelerator",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTokenClassification",
    "CheckpointError",
    "DeepSpeedSequenceParallelConfig",
    "DerivedPlan",
    "DistributedConfig",
    "Guard",
    "LayoutError",
    "ParallelInterface",
    "ParallelismConfig",
    "PlaitError",
    "PlanError",
    "RankError",
    "SequenceParallelConfig",
    "SequenceParallelLoader",
    "TensorParallelLayer",
    "UlyssesSPDataLoaderAdapter",
    "WeightsError",
    "adopt",
    "checkpoint",
    "derive_plan",
    "full_grads",
    "full_state_dict",
    "gathered",
    "guard",
    "held_fraction",
    "loss",
    "parallelize",
    "sequence_sum",
    "split_batch",
    "styles",
    "use_attention",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "loss", "styles"):
        return importlib.import_module(f"plait.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
