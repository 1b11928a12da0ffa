"""Fused optimizer steps that torch's DTensors do not know: they run on each rank's own part.

Such a step changes every element by its own gradient and state, so nothing has to be communicated
and the parts may be of any size. torch knows the fused forms of Adam and AdamW by itself.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plait.errors import PlaitError
from plait.run import torch_private

_STEPS = (
    ("_fused_sgd_", ("default", "tensor_lr")),
    ("_fused_adagrad_", ("default", "tensor_lr")),
)


def serve_fused_steps() -> None:
    """Let the fused forms of SGD and Adagrad work on DTensors; once for the process.

    Comm: none.
    """
    handlers = torch_private.dtensor_handlers()
    for name, overloads in _STEPS:
        packet = getattr(torch.ops.aten, name, None)
        for overload in overloads:
            step = getattr(packet, overload, None)
            if step is not None:
                handlers.setdefault(step, _on_own_parts)


def _on_own_parts(step: Any, args: Any, kwargs: Any) -> None:
    """Run a step on local tensors.

    Raises:
        PlaitError: A gradient or a state lies on the ranks in another way than its parameter.
    """
    first = args[0] if args else kwargs["self"]
    for held in (*args, *kwargs.values()):
        if isinstance(held, list | tuple) and len(held) == len(first):
            _refuse_others(step, first, held)
    local = [_local(x) for x in args]
    step(*local, **{name: _local(x) for name, x in kwargs.items()})


def _refuse_others(step: Any, params: Any, held: Any) -> None:
    for param, x in zip(params, held, strict=True):
        if not isinstance(x, torch.Tensor) or x.shape != param.shape:
            continue  # a number, or a counter of steps
        if isinstance(x, DTensor) != isinstance(param, DTensor) or (
            isinstance(x, DTensor) and x.placements != param.placements
        ):
            raise PlaitError(
                f"{step} of a parameter {tuple(param.shape)}:",
                f"it lies as {_lies(param)}, its gradient or state as {_lies(x)}",
                "give the gradient the placements of the parameter",
            )


def _lies(x: torch.Tensor) -> str:
    return str(x.placements) if isinstance(x, DTensor) else "a plain tensor"


def _local(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x._local_tensor
    if isinstance(x, list | tuple):
        return [_local(part) for part in x]
    return x
