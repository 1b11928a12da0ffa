"""Views and selections that leave the vocabulary whole: the same on each rank's slice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.loss.labels import plain
from plait.loss.logits import SplitLogits
from plait.loss.naming import functions


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view` and `reshape` to a shape whose last dim is the vocabulary."""
    x: SplitLogits = args[0]
    sizes: tuple[Any, ...] = args[1:] or (kwargs.get("shape", kwargs.get("size")),)
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    whole = x.vocabulary.whole
    if x.vocabulary_dim != -1 or not sizes or not all(isinstance(n, int) for n in sizes):
        return NotImplemented
    rows = x.local.shape[:-1].numel()
    known, unknown = 1, sum(n == -1 for n in sizes)
    for n in sizes:
        known *= 1 if n == -1 else n
    last, front = sizes[-1], list(sizes[:-1])
    if unknown == 1 and known and rows * whole % known == 0:
        found = rows * whole // known
        front = [found if n == -1 else n for n in front]
        last = found if last == -1 else last
    if last != whole or -1 in front or torch.Size(front).numel() != rows:
        return NotImplemented
    reshaped = x.local.view if "view" in func.__name__ else x.local.reshape
    return x.like(reshaped(*front, x.vocabulary.local))


def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`flatten` of dims before the vocabulary."""
    given = dict(zip(("input", "start_dim", "end_dim"), args, strict=False)) | kwargs
    x, start, end = args[0], given.get("start_dim", 0), given.get("end_dim", -1)
    whole = not isinstance(start, int) or not isinstance(end, int) or x.vocabulary_dim != -1
    if whole or not x.ndim or end % x.ndim == x.ndim - 1:
        return NotImplemented
    return x.like(x.local.flatten(start, end))


def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims that change places, or a new one."""
    x = args[0]
    # The sizes of an imaginary tensor tell where each dim has gone.
    sizes = torch.empty(tuple(range(2, x.ndim + 2)), device="meta")
    moved = func(sizes, *args[1:], **kwargs).shape
    dim = list(moved).index(x.vocabulary_dim + x.ndim + 2) - len(moved)
    return x.like(func(x.local, *args[1:], **kwargs), dim)


def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A dim of one that goes, before the vocabulary."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x, dim = args[0], given.get("dim")
    if x.vocabulary_dim != -1 or not isinstance(dim, int) or dim % x.ndim == x.ndim - 1:
        return NotImplemented
    return x.like(x.local.squeeze(dim))


def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts along another dim than the vocabulary's."""
    name = getattr(func, "__name__", "")
    place = 2 if name in ("split", "chunk", "split_with_sizes", "tensor_split") else 1
    default = None if name in ("narrow", "select", "index_select") else 0
    x, dim = args[0], kwargs.get("dim", args[place] if len(args) > place else default)
    if not isinstance(x, SplitLogits) or not isinstance(dim, int):
        return NotImplemented
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.vocabulary_dim + x.ndim:
        return NotImplemented
    removed = name in ("select", "unbind") and dim % x.ndim > x.vocabulary_dim + x.ndim
    parts = func(x.local, *map(plain, args[1:]), **{k: plain(v) for k, v in kwargs.items()})
    to = x.vocabulary_dim + int(removed)
    return (
        x.like(parts, to)
        if isinstance(parts, Tensor)
        else type(parts)(x.like(part, to) for part in parts)
    )


def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cat` and `stack` along another dim than the vocabulary's."""
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    parts, dim = given["tensors"], given.get("dim", 0)
    if "out" in given or not all(isinstance(x, SplitLogits) for x in parts):
        return NotImplemented
    first = parts[0]
    same = all(x.vocabulary == first.vocabulary and x.vocabulary_dim == -1 for x in parts)
    ndim = first.ndim + (func is torch.stack)
    if not same or not isinstance(dim, int) or dim % ndim == ndim - 1:
        return NotImplemented
    return first.like(func([x.local for x in parts], dim))


def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`logits[…]` with anything that leaves the last dim whole."""
    x, asked = args
    if not isinstance(x, SplitLogits) or x.vocabulary_dim != -1:
        return NotImplemented
    items = list(asked) if isinstance(asked, tuple) else [asked]
    if any(isinstance(item, bool | SplitLogits | str) for item in items):
        return NotImplemented
    items = [plain(item) for item in items]
    used = sum(_dims(item) for item in items)
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    reaches = (dots and dots[-1] < len(items) - 1) or (not dots and used == x.ndim)
    if used > x.ndim or (dots and not reaches and used == x.ndim):
        return NotImplemented
    if reaches:
        if not _is_all(items[-1], x.vocabulary.whole):
            return NotImplemented
        items[-1] = slice(None)
    return x.like(x.local[tuple(items)])


def _dims(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 1


def _is_all(item: Any, size: int) -> bool:
    if not isinstance(item, slice):
        return False
    stop = item.stop is None or (isinstance(item.stop, int) and item.stop >= size)
    return item.start in (None, 0) and item.step in (None, 1) and stop


ANSWERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(functions("view reshape"), view),
    **dict.fromkeys(functions("flatten"), flatten),
    **dict.fromkeys(
        functions("transpose permute movedim moveaxis swapaxes swapdims unsqueeze t"),
        move,
    ),
    **dict.fromkeys(functions("squeeze"), squeeze),
    **dict.fromkeys(
        functions("narrow select index_select split chunk unbind"),
        along,
    ),
    **dict.fromkeys(functions("cat concat stack"), join),
    Tensor.__getitem__: index,
}
"""Function → what it does with split logits."""
