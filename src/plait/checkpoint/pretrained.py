"""What is kept of a model of transformers, so that its checkpoint can become an ordinary one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from plait.checkpoint import files
from plait.checkpoint.files import FileRecord
from plait.checkpoint.held import HeldModel
from plait.checkpoint.manifest import PRETRAINED
from plait.hf.adapt import is_transformers_model
from plait.hf.exporting import files_beside, stored_tensors


@dataclass(frozen=True)
class Pretrained:
    """The files beside the weights, and what the weight files would hold.

    Attributes:
        files: By their paths in the folder `pretrained`.
        stored: Names of the weight files' tensors with shapes and dtypes; None: not known.
    """

    files: Mapping[str, bytes]
    stored: Mapping[str, Any] | None = field(default=None)

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Writes the files into a checkpoint's folder; their records by their paths in it."""
        records = {}
        for name, content in self.files.items():
            path = folder / PRETRAINED / name
            path.parent.mkdir(parents=True, exist_ok=True)
            records[f"{PRETRAINED}/{name}"] = files.write(path, content)
        return records


def pretrained(model: nn.Module, held: HeldModel, tokenizer: Any = None) -> Pretrained | None:
    """What is kept of a model; None for one that is not of transformers.

    Args:
        model: The model.
        held: Its tensors.
        tokenizer: What has a `save_pretrained`, to be kept beside it.
    """
    if not is_transformers_model(model):
        return None
    tensors = {name: (x.shape, x.local.dtype) for name, x in held.tensors.items()}
    tensors |= {name: tensors[first] for name, first in held.tied.items()}
    return Pretrained(files_beside(model, tokenizer), stored_tensors(model, tensors))
