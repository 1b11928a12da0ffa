"""Count the collectives of a block of code, plait's own and torch's, by kind and phase."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.run import torch_private

_open: list["Count"] = []
_depth_unseen = 0

# Operators of torch that talk, by the kind plait calls them: (kind, index of the argument that
# holds the whole tensor; None where the result does).
_c10d: dict[str, tuple[str, int | None]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", None),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
}


class Tally(Mapping[str, int]):
    """Calls by kind, with the bytes they acted on; equal to a plain dict of the calls.

    Attributes:
        bytes: Bytes acted on by kind: number of elements × element size of the whole tensor (the
            gathered one for all_gather, the unscattered one for reduce_scatter).
    """

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def add(self, kind: str, num_bytes: int) -> None:
        """Record one call."""
        self._calls[kind] = self._calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + num_bytes

    def __getitem__(self, kind: str) -> int:
        return self._calls.get(kind, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, kind: object) -> bool:
        return kind in self._calls

    def __repr__(self) -> str:
        kinds = (f"{k}: {n} ({self.bytes[k]:,} B)" for k, n in sorted(self._calls.items()))
        return "{" + ", ".join(kinds) + "}"


class Count(Tally):
    """What [`count`][plait.comm.count] saw.

    Attributes:
        forward: The calls made outside of a backward pass.
        backward: The calls made by a backward pass (recomputed ones of checkpointing included).
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = Tally()
        self.backward = Tally()
        self._mode: _SeeTorch | None = None

    def record(self, kind: str, num_bytes: int) -> None:
        """Record one call in the total and in its phase."""
        self.add(kind, num_bytes)
        (self.backward if _in_backward() else self.forward).add(kind, num_bytes)

    def __enter__(self) -> "Count":
        self._mode = _SeeTorch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _open.remove(self)
        assert self._mode is not None
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._mode = None

    # The totals of two counts may be equal; the counters themselves are told apart.
    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    __hash__ = object.__hash__


def count() -> Count:
    """Count the collectives of a `with` block, on this rank.

    plait's own collectives are seen on every transport, and those that torch issues (DTensor's
    redistribution, functional collectives, `torch.distributed` calls) through the dispatcher.
    Control messages ([`exchange`][plait.comm.exchange]) and point-to-point set-up are not
    collectives and are not counted.

    Returns:
        A context manager that gives a [`Count`][plait.comm.Count].

    Example:
        >>> with count() as c:
        ...     y = model(x)
        >>> c == {"all_reduce": 17}
    """
    return Count()


def record(kind: str, num_bytes: int) -> None:
    """Tell the open counts of one collective of plait."""
    for counter in _open:
        counter.record(kind, num_bytes)


def is_counting() -> bool:
    """Whether a count is open (so that the hot path can skip the arithmetic)."""
    return bool(_open)


@contextmanager
def unseen() -> Iterator[None]:
    """Calls to torch.distributed in this block have been counted already, or are not to be."""
    global _depth_unseen
    _depth_unseen += 1
    try:
        yield
    finally:
        _depth_unseen -= 1


def _in_backward() -> bool:
    return torch_private.in_backward()


class _SeeTorch(TorchDispatchMode):
    """Sees the collective operators of torch."""

    def __init__(self, counter: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(_is_dtensor(kind) for kind in types):
            # Let DTensor turn the operator into operators on local tensors and collectives;
            # they come back here one by one.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not _depth_unseen and isinstance(func, torch._ops.OpOverload):
            talk = _c10d.get(func._schema.name)
            if talk is not None:
                kind, place = talk
                self.counter.record(kind, _num_bytes(out if place is None else args[place]))
        return out


def _is_dtensor(kind: type) -> bool:
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def _num_bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    if isinstance(x, (list, tuple)):
        return sum(_num_bytes(part) for part in x)
    return 0
