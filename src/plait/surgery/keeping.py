"""`to(dtype)`, `half()` and `float()` keep what plait has recorded on the parameters."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.errors import PlaitError
from plait.run import torch_private


def keep_records(part: nn.Module) -> None:
    """Let one module's conversions keep the attributes of its parameters.

    torch converts a DTensor by exchanging the parameter's content with a new one's, its attributes
    included, so that the index ranges recorded on it would be lost.
    """
    if part._parameters:
        part.__dict__["_apply"] = MethodType(_apply, part)


def keep_dtype(root: nn.Module) -> None:
    """Refuse another dtype for a sharded model whose buffers FSDP has made for the one it had.

    FSDP notes the dtype of the parameters at the first forward and would go on with it.
    """
    root.__dict__["_apply"] = MethodType(_apply_sharded, root)


def _apply_sharded(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    param = next(self.parameters())
    dtype = fn(torch.empty(0, dtype=param.dtype)).dtype
    if dtype != param.dtype and _has_run(self):
        raise PlaitError(
            f"{type(self).__name__} in {dtype}, after its first forward on {param.dtype}:",
            "the parameters are sharded over data ranks, and FSDP has noted their dtype",
            [
                f"convert it before the first forward, or load it with dtype={dtype}",
                "fsdp_mixed_precision=True computes in bfloat16 and keeps the parameters",
            ],
        )
    return _apply(self, fn, recurse)


def _has_run(root: nn.Module) -> bool:
    return isinstance(root, FSDPModule) and torch_private.fsdp_has_run(root)


def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    records = {name: dict(p.__dict__) for name, p in self._parameters.items() if p is not None}
    converted = type(self)._apply(self, fn, recurse)
    for name, record in records.items():
        param = self._parameters[name]
        if param is not None:
            for key, value in record.items():
                param.__dict__.setdefault(key, value)
    return converted
