"""What can be done with a batch whatever it is made of: nested dicts, lists, tuples of tensors."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from plait.loss.labels import Placeholder

IGNORED = -100
"""The label of a token that no loss counts; the default of `torch.nn.functional.cross_entropy`."""

LABELS = ("labels", "shift_labels")
"""Keys under which batches carry integer labels."""


def map_tensors(fn: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """The same containers with `fn(x)` in the place of every tensor; other values stay.

    Args:
        fn: What to do with one tensor.
        data: Tensors in mappings, lists, tuples and named tuples of any depth.
    """
    if isinstance(data, torch.Tensor):
        return fn(data)
    if isinstance(data, Mapping):
        return _with_items(data, {key: map_tensors(fn, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(fn, value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(fn, value) for value in data)
    return data


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested structure, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_of(value)


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """The batch with its tensors on `device`."""
    return map_tensors(lambda x: x.to(device, non_blocking=non_blocking), data)


def num_samples(data: Any) -> int:
    """Length of the first dim of the first tensor that has one; 1 where there is none."""
    return next((x.shape[0] for x in tensors_of(data) if x.ndim), 1)


def rows(data: Any, start: int, stop: int) -> Any:
    """Some samples of a batch: the rows of all that is as long as the batch.

    Args:
        data: The batch.
        start: First sample.
        stop: Behind the last one.
    """
    size = num_samples(data)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.ndim and value.shape[0] == size else value
        if isinstance(value, Mapping):
            return _with_items(value, {key: cut(item) for key, item in value.items()})
        if isinstance(value, list | tuple):
            holds_tensors = any(True for _ in tensors_of(value))
            if not holds_tensors and len(value) == size:
                return value[start:stop]
            if hasattr(value, "_fields"):
                return type(value)(*map(cut, value))
            return type(value)(map(cut, value))
        return value

    return cut(data)


def without_labels(data: Any) -> Any:
    """The batch marked as none of this rank's: no label in it counts in a loss, whatever its name.

    A model that is called with a marked tensor regards all its labels as ignored. For code that
    counts labels itself, integer `labels` and `shift_labels` show as ignored.

    Args:
        data: Tensors in mappings, lists, tuples and named tuples of any depth.
    """
    marked = map_tensors(Placeholder.of, data)
    if not isinstance(data, Mapping):
        return marked
    shown = {}
    for key in LABELS:
        labels = data.get(key)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            shown[key] = Placeholder.of(labels, torch.full_like(labels, IGNORED))
    return _with_items(marked, {**marked, **shown})


def _with_items(data: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    """A mapping of the same kind with other values."""
    same = copy.copy(data)
    try:
        for key, value in items.items():
            same[key] = value  # type: ignore[index]
    except TypeError:  # one that cannot be changed
        return dict(items)
    return same
