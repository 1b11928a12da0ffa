"""The losses of torch, over the tokens or elements of all data ranks where labels are in them."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from plait.loss import entropy
from plait.loss.kernel import Terms
from plait.loss.labels import Record, plain, record_of
from plait.loss.logits import SplitLogits
from plait.loss.reduction import reduce_tokens
from plait.loss.vocabulary import Vocabulary


def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cross entropy of split logits, or of whole ones with the labels of a model's call."""
    given, record = _arguments(F.cross_entropy, args, kwargs)
    x, target = given["input"], given["target"]
    if entropy.takes(given) and entropy.shapes_fit(x, target):
        x = entropy.class_last(x)
        if isinstance(x, SplitLogits) and x.vocabulary_dim == -1:
            local, vocabulary = x.local, x.vocabulary
        else:
            local = _whole(x)
            vocabulary = Vocabulary((local.shape[-1],))
        terms = Terms(given["label_smoothing"])
        asked = entropy.Asked(given["ignore_index"], given["reduction"], terms, record)
        named = f"cross_entropy of logits {tuple(given['input'].shape)}:"
        return entropy.entropy(named, local, target, vocabulary, asked)
    given["input"] = _whole(x)
    if not entropy.takes({**given, "weight": None}):
        return F.cross_entropy(**given)  # torch's own error
    return entropy.whole_entropy(F.cross_entropy, given, record)


def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The negative log-likelihood, of split logarithms of probabilities or of whole ones."""
    given, record = _arguments(F.nll_loss, args, kwargs)
    x, target = given["input"], given["target"]
    plain_one = {**given, "label_smoothing": 0.0}
    if not entropy.takes({**plain_one, "weight": None}):
        return F.nll_loss(**{**given, "input": _whole(x)})  # torch's own error
    if not (entropy.takes(plain_one) and entropy.shapes_fit(x, target)):
        return entropy.whole_entropy(F.nll_loss, {**given, "input": _whole(x)}, record)
    last = entropy.class_last(x)
    valid = target != given["ignore_index"]
    places = target.masked_fill(~valid, 0).unsqueeze(-1)
    losses = -torch.gather(last, -1, places).squeeze(-1).masked_fill(~valid, 0)
    return reduce_tokens(losses, valid.sum(), given["reduction"], record, dtype=losses.dtype)


def by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss whose mean is that of what it gives with `reduction="none"`.

    Args:
        func: The function of `torch.nn.functional`.
        args: What it is called with.
        kwargs: The same, by name.

    Comm: with data ranks one all-reduce, that of `reduce_tokens`.
    """
    given, record = _arguments(func, args, kwargs)
    given = {name: _whole(x) for name, x in given.items()}
    reduction = given["reduction"]
    if reduction not in ("mean", "sum", "none", "batchmean"):
        return func(**given)  # torch's own error
    losses = func(**{**given, "reduction": "none"})
    count = torch.tensor(losses.numel(), device=losses.device)
    weight = None
    if reduction == "batchmean":
        reduction, weight = "mean", torch.tensor(given["input"].shape[0], device=losses.device)
    elif given.get("weight") is not None and func in (F.mse_loss, F.l1_loss):
        weight = given["weight"].sum()
    elif func is F.ctc_loss and reduction == "mean":
        lengths = torch.as_tensor(given["target_lengths"], device=losses.device)
        losses = losses / lengths.clamp(min=1)
    return reduce_tokens(losses, count, reduction, record, weight, losses.dtype)


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, SplitLogits) else x


def _arguments(
    signature_of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Record]:
    """The arguments by name, as plain tensors, and to which call of a model they belong."""
    bound = _signature(signature_of).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        given["reduction"] = torch.nn._reduction.legacy_get_string(
            given["size_average"], given["reduce"]
        )
        given["size_average"] = given["reduce"] = None
    record = record_of(*given.values())
    if record.data_mesh is None:  # split logits know the ranks where a loss is not the model's
        meshes = (x.data_mesh for x in given.values() if isinstance(x, SplitLogits))
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        record = Record(mesh, record.counts, record.idle, record.num_items)
    given = {name: plain(x) for name, x in given.items()}
    if "target" in given:
        given["target"] = _whole(given["target"])
    return given, record


@lru_cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


_BY_ELEMENT = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy ctc_loss "
    "binary_cross_entropy_with_logits soft_margin_loss multilabel_soft_margin_loss "
    "multilabel_margin_loss multi_margin_loss poisson_nll_loss gaussian_nll_loss "
    "hinge_embedding_loss cosine_embedding_loss margin_ranking_loss"
)

ANSWERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    **{getattr(F, name): by_element for name in _BY_ELEMENT.split()},
}
"""Loss → how it is computed with labels of a model's call, or of split logits."""
