"""Computing in 16 bits: autocast around the forwards, and scaled losses for float16."""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn

from plait.errors import PlaitError
from plait.loss.asking import call
from plait.styles.layer import rebind
from plait.train.batches import map_tensors

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of `mixed_precision`, and what matrix products are computed in."""

_INNER = "_plait_unprepared_forward"
_SETTINGS = "_plait_prepared_forward"


def dtype_of(mixed_precision: str | None) -> torch.dtype | None:
    """What a `mixed_precision` computes in; None: what the parameters are.

    Raises:
        PlaitError: There is none of this name.
    """
    name = str(mixed_precision or "no").lower()
    if name not in DTYPES:
        raise PlaitError(
            f"mixed_precision={mixed_precision!r}:",
            f"it is none of {', '.join(map(repr, DTYPES))}",
            "mixed_precision='bf16'",
        )
    return DTYPES[name]


def autocast(
    device_type: str, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products are computed in `dtype`; None: nothing changes."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def scaler_for(device_type: str, dtype: torch.dtype | None) -> Any:
    """A scaler of losses, for float16 only: small gradients would be zero there."""
    return torch.amp.GradScaler(device_type) if dtype is torch.float16 else None


def install(
    model: nn.Module, device_type: str, dtype: torch.dtype | None, counting: bool = False
) -> None:
    """Let every forward of a model be computed in `dtype`.

    What the caller computes a loss from comes back in float32. An output that has its loss already
    is left as it is, since its logits may be large.

    Args:
        model: The outermost module; done once.
        device_type: "cpu" or "cuda".
        dtype: The dtype of matrix products; None: as the parameters are.
        counting: Let its losses note over how many tokens they are; split models do so already.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return
    if _SETTINGS not in model.__dict__:
        if dtype is None and not counting:
            return
        model.__dict__[_INNER] = model.__dict__.get("forward")
        rebind(model, _forward)
    model.__dict__[_SETTINGS] = (device_type, dtype, counting)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device_type, dtype, counting = module.__dict__[_SETTINGS]
    inner = module.__dict__[_INNER] or partial(type(module).forward, module)
    with autocast(device_type, dtype):
        if counting:
            output = call(module, inner, args, kwargs, None)
        else:
            output = inner(*args, **kwargs)
    if dtype is None or getattr(output, "loss", None) is not None:
        return output
    return map_tensors(lambda x: x.float() if x.dtype is dtype else x, output)
