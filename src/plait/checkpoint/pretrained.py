"""What is kept of a model of transformers, so that its checkpoint can become an ordinary one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Pretrained:
    """The config, generation config and tokenizer of a model."""

    model: Any
    tokenizer: Any

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the files."""
        folder.mkdir()
        return {}


def pretrained(model: nn.Module, tokenizer: Any = None) -> Pretrained | None:
    """What is kept of a model; None for one that is not of transformers."""
    return None
