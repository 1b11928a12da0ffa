"""Cross entropy over a split vocabulary: the functional form, and what torch's functions become."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import announce_failure, exchange
from plait.errors import PlaitError
from plait.loss.kernel import Terms, token_losses
from plait.loss.labels import Record, plain, record_of
from plait.loss.logits import SplitLogits
from plait.loss.reduction import reduce_tokens
from plait.loss.vocabulary import Vocabulary

_REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Asked:
    """How a loss is asked for.

    Attributes:
        ignore_index: The label that does not count.
        reduction: "mean", "sum" or "none".
        terms: What is added to the loss of a token.
        record: The call of a model, with the ranks that see other tokens.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    terms: Terms = Terms()  # noqa: RUF009
    record: Record = field(default_factory=Record)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    mesh: DeviceMesh | None = None,
    data_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Cross entropy of logits whose vocabulary may be split over ranks.

    The value and the gradient are those of `torch.nn.functional.cross_entropy` on the whole logits.
    16-bit logits are summed in float32. With every label ignored the mean is nan, as in torch, and
    the gradient is zero.

    Args:
        logits: `[..., vocab]`: [`SplitLogits`][plait.loss.SplitLogits], or whole and the same on
            every rank; with `mesh` this rank's slice `[..., vocab_local]`.
        labels: `[...]`, integers, the same on every rank that holds a slice.
        ignore_index: The label of tokens that do not count.
        label_smoothing: The share of the target that is spread evenly over the vocabulary.
        z_loss: Adds `z_loss · log(Σ exp)²` to every token's loss, which keeps the normaliser near
            1; 1e-4 is usual.
        reduction: "mean" over the tokens that count, "sum" or "none" (a loss for each token, 0
            where the label is ignored).
        mesh: The axis over which the vocabulary of plain `logits` is split, in rank order; the
            ranks' slices may be of different sizes.
        data_mesh: Ranks that see other tokens. A mean or sum is then that of all of their tokens,
            and the gradient such that its mean over these ranks is that of the whole.

    Returns:
        A scalar, or with "none" `[...]`, in the dtype of `logits` (under autocast float32).

    Raises:
        PlaitError: The arguments do not fit, or a label is no entry of the vocabulary; on every
            rank that holds this label, before anything is communicated.

    Comm:
        Forward two all-reduces over the vocabulary's ranks, of one number a token and of two (of
        three with label smoothing); with `data_mesh` one more over these, of five numbers.
        Backward nothing. A plain slice with `mesh`: one control message, the slices' sizes.

    Source: Chowdhery et al., PaLM (arXiv 2204.02311), section 5, for the z-loss; the rest as in
        `plait.loss.kernel`.
    """
    record = record_of(labels, logits)
    logits, labels = plain(logits), plain(labels)
    asked = Asked(ignore_index, reduction, Terms(label_smoothing, z_loss))
    named = f"plait.loss.cross_entropy(logits {tuple(logits.shape)}, labels {tuple(labels.shape)}):"
    x, vocabulary, data = _slice_of(named, logits, mesh)
    problems = _problems(asked, labels)
    if labels.shape != logits.shape[:-1]:
        problems.append("labels have one number for each row of the logits' last dim")
    if problems:
        raise PlaitError(named, problems, "see plait.loss.cross_entropy for what each one may be")
    if data_mesh is not None or record.data_mesh is None:
        record = Record(data_mesh or data, record.counts, record.idle, record.num_items)
    asked = Asked(ignore_index, reduction, asked.terms, record)
    return entropy(named, x, labels, vocabulary, asked)


def entropy(
    named: str, x_local: Tensor, labels: Tensor, vocabulary: Vocabulary, asked: Asked
) -> Tensor:
    """Cross entropy of checked arguments; the vocabulary is the last dim of `x_local`."""
    shape, labels = labels.shape, labels.reshape(-1).long()
    valid = labels != asked.ignore_index
    _check_range(named, labels, valid, vocabulary.whole, asked.record.data_mesh)
    x = x_local.reshape(labels.numel(), x_local.shape[-1])
    losses = token_losses(x, labels, valid, vocabulary, asked.terms)
    dtype = result_dtype(x_local)
    losses = losses.view(shape)
    return reduce_tokens(losses, valid.sum(), asked.reduction, asked.record, dtype=dtype)


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype that torch gives a loss of these logits."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled(x.device.type) else x.dtype


def whole_entropy(func: Any, arguments: dict[str, Any], record: Record) -> Tensor:
    """Torch's cross entropy or nll_loss of whole logits, over the tokens of all data ranks.

    Args:
        func: `torch.nn.functional.cross_entropy` or `nll_loss`.
        arguments: Its arguments, by name.
        record: The call of a model, with the ranks that see other tokens.

    Comm: with data ranks one all-reduce of five numbers.
    """
    target, class_weight = arguments["target"], arguments["weight"]
    losses = func(**{**arguments, "reduction": "none"})
    if target.is_floating_point():  # a distribution for each token
        count, weight = torch.tensor(losses.numel(), device=losses.device), None
    else:
        valid = target != arguments["ignore_index"]
        count, weight = valid.sum(), None
        if class_weight is not None:
            weight = class_weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()
    return reduce_tokens(losses, count, arguments["reduction"], record, weight, losses.dtype)


def class_last(x: Tensor) -> Tensor:
    """Logits with torch's dim of classes, the second or the only one, put last; a view."""
    return x.movedim(1, -1) if x.ndim > 2 else x


def shapes_fit(logits: Tensor, target: Tensor) -> bool:
    """Whether torch takes these as logits and indices of classes."""
    if not logits.ndim or target.is_floating_point() or target.is_complex():
        return False
    shape = logits.shape
    return target.shape == (shape[:1] + shape[2:] if logits.ndim > 1 else ())


def takes(arguments: dict[str, Any]) -> bool:
    """Whether a call of torch's cross entropy is one that is computed here."""
    plain = arguments["weight"] is None and arguments["reduction"] in _REDUCTIONS
    plain = plain and arguments["size_average"] is None and arguments["reduce"] is None
    return plain and 0 <= arguments["label_smoothing"] <= 1


def _slice_of(
    named: str, logits: Tensor, mesh: DeviceMesh | None
) -> tuple[Tensor, Vocabulary, DeviceMesh | None]:
    if isinstance(logits, SplitLogits):
        split = logits.settled()
        if isinstance(split, SplitLogits) and split.vocabulary_dim == -1:
            return split.local, split.vocabulary, split.data_mesh
        logits = split.whole() if isinstance(split, SplitLogits) else split
        return logits, Vocabulary((logits.shape[-1],)), None
    if not logits.ndim or not logits.is_floating_point():
        raise PlaitError(named, f"logits are floats with a last dim of classes, not {logits.dtype}")
    if mesh is None:
        return logits, Vocabulary((logits.shape[-1],)), None
    return logits, Vocabulary.over(exchange(logits.shape[-1], mesh), mesh), None


def _problems(asked: Asked, labels: Tensor) -> list[str]:
    problems = []
    if asked.reduction not in _REDUCTIONS:
        problems.append(f"reduction={asked.reduction!r} is none of {', '.join(_REDUCTIONS)}")
    if not 0 <= asked.terms.label_smoothing <= 1:
        problems.append(f"label_smoothing={asked.terms.label_smoothing} is not between 0 and 1")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        problems.append(f"labels are of {labels.dtype}, not integers")
    return problems


def _check_range(
    named: str, labels: Tensor, valid: Tensor, size: int, data_mesh: DeviceMesh | None
) -> None:
    """Refuse labels that are no entry of the vocabulary, which would count as one of no rank."""
    if labels.numel() == 0 or labels.is_meta:
        return
    known = labels.masked_fill(~valid, 0)
    if labels.is_cuda:
        torch._assert_async(((known >= 0) & (known < size)).all())
        return
    low, high = (int(x) for x in torch.aminmax(known))
    if low < 0 or high >= size:
        error = PlaitError(
            named,
            f"labels from {low} to {high} for a vocabulary of {size} entries",
            [
                "ignore_index for tokens that do not count",
                "check that the tokenizer is the model's",
            ],
        )
        if data_mesh is not None:
            announce_failure(data_mesh, error)
        raise error
