"""Results of parameters that are kept while these cannot change.

Nothing tells reliably that a DTensor's elements have changed: in-place operations, `.data`, and the
fused and foreach functions of optimizers leave the version counters of its local tensor alone. So a
result that costs a collective is kept only where its caller says that parameters stay as they are:
in one call of `generate()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_Kept = dict[tuple[int, str], tuple[object, torch.Tensor, torch.Tensor]]
_KEPT: ContextVar[_Kept | None] = ContextVar("plait_kept", default=None)


@contextmanager
def parameters_unchanged() -> Iterator[None]:
    """In here no parameter changes, on any rank; what is kept is dropped at the end.

    Inside of another one, as for an assistant of `generate()`, it does nothing.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(owner: object, key: str, source: torch.Tensor) -> torch.Tensor | None:
    """What `keep` was given for the same owner, key and source, or None.

    Args:
        owner: What computes the result.
        key: Which of its results.
        source: The tensor that it is computed from.
    """
    table = _KEPT.get()
    found = None if table is None else table.get((id(owner), key))
    return found[2] if found is not None and found[1] is source else None


def keep(owner: object, key: str, source: torch.Tensor, x: torch.Tensor) -> None:
    """Keep a result for the rest of `parameters_unchanged`; outside of it, do nothing."""
    table = _KEPT.get()
    if table is not None and not x.requires_grad:
        table[(id(owner), key)] = (owner, source, x)
