"""`to(dtype)`, `half()` and `float()` keep what plait has recorded on the parameters."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def keep_records(part: nn.Module) -> None:
    """Let one module's conversions keep the attributes of its parameters.

    torch converts a DTensor by exchanging the parameter's content with a new one's, its attributes
    included, so that the index ranges recorded on it would be lost.
    """
    if part._parameters:
        part.__dict__["_apply"] = MethodType(_apply, part)


def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    records = {name: dict(p.__dict__) for name, p in self._parameters.items() if p is not None}
    converted = type(self)._apply(self, fn, recurse)
    for name, record in records.items():
        param = self._parameters[name]
        if param is not None:
            for key, value in record.items():
                param.__dict__.setdefault(key, value)
    return converted
