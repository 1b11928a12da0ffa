"""Functions over the vocabulary that need a few numbers a row from every rank, not the row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.comm import all_gather
from plait.loss import entropy
from plait.loss.kernel import logsumexp
from plait.loss.labels import plain
from plait.loss.logits import SplitLogits
from plait.loss.naming import functions
from plait.loss.vocabulary import Vocabulary


def log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank's slice of the logarithms of probabilities."""
    found = _over_last(args, kwargs, ("dim", "_stacklevel", "dtype"))
    if found is None or args[0].ndim < 1:
        return NotImplemented
    x, given = found
    local = x.local if given.get("dtype") is None else x.local.to(given["dtype"])
    lse = _lse(local, x.vocabulary)
    return x.like((local - x.vocabulary.copy(lse).unsqueeze(-1)).to(_soft_dtype(local)))


def softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank's slice of the probabilities."""
    found = log_softmax(func, args, kwargs)
    return found if found is NotImplemented else found.exp()


def log_sum_exp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The logarithm of the sum of exponentials over all ranks' slices."""
    found = _over_last(args, kwargs, ("dim", "keepdim"))
    if found is None:
        return NotImplemented
    x, given = found
    lse = _lse(x.local, x.vocabulary).to(x.local.dtype)
    return lse.unsqueeze(-1) if given.get("keepdim") else lse


def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum over all ranks' slices."""
    found = _over_last(args, kwargs, ("dim", "keepdim", "dtype"))
    if found is None or found[0].local.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented  # 16-bit numbers are added up and rounded once
    x, given = found
    return x.vocabulary.sum(func(x.local, -1, **{k: v for k, v in given.items() if k != "dim"}))


def argmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The index of the largest entry, the first one of equal ones."""
    found = _over_last(args, kwargs, ("dim", "keepdim"))
    if found is None:
        return NotImplemented
    x, given = found
    local, vocabulary = x.local.detach(), x.vocabulary
    if vocabulary.mesh is None:
        return func(local, -1, given.get("keepdim", False))
    if min(vocabulary.sizes) == 0 or not local.numel():
        return NotImplemented
    values, places = local.max(-1)
    wide = torch.stack([values.double(), (places + vocabulary.start).double()])
    wide = all_gather(wide.unsqueeze(0), vocabulary.mesh, dim=0)
    best = wide[:, 0].argmax(0, keepdim=True)
    places = wide[:, 1].gather(0, best).squeeze(0).long()
    return places.unsqueeze(-1) if given.get("keepdim") else places


def gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The entries at places in the vocabulary, from the ranks that hold them."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    x, index = given["input"], given.get("index")
    last = isinstance(x, SplitLogits) and x.vocabulary_dim == -1
    if not last or given.get("dim") not in (-1, x.ndim - 1) or not isinstance(index, Tensor):
        return NotImplemented
    index = plain(index)
    inside = index.numel() == 0 or (index.min() >= 0 and index.max() < x.vocabulary.whole)
    if isinstance(index, SplitLogits) or index.ndim != x.ndim or not inside:
        return NotImplemented  # torch's own error
    here = index - x.vocabulary.start
    other = (here < 0) | (here >= x.vocabulary.local)
    if x.vocabulary.local == 0:
        found = x.local.new_zeros(index.shape) + x.local.sum()
    else:
        found = x.local.gather(-1, here.masked_fill(other, 0)).masked_fill(other, 0)
    return x.vocabulary.sum(found)


def _lse(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    rows = local.reshape(local.shape[:-1].numel(), local.shape[-1])
    return logsumexp(rows, vocabulary).view(local.shape[:-1])


def _soft_dtype(x: Tensor) -> torch.dtype:
    return entropy.result_dtype(x)


def _over_last(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[SplitLogits, dict[str, Any]] | None:
    """Split logits and the named arguments, where the function is over the vocabulary alone."""
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    x, dim = args[0] if args else None, given.get("dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(x, SplitLogits) or x.vocabulary_dim != -1 or type(dim) is not int:
        return None
    return (x, given) if dim in (-1, x.ndim - 1) and set(given) <= set(names) else None


ANSWERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(functions("log_softmax"), log_softmax),
    **dict.fromkeys(functions("softmax"), softmax),
    **dict.fromkeys(functions("logsumexp"), log_sum_exp),
    **dict.fromkeys(functions("sum"), total),
    **dict.fromkeys(functions("argmax"), argmax),
    **dict.fromkeys(functions("gather"), gather),
}
"""Function → what it does with split logits."""
