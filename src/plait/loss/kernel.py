"""The numbers of a cross entropy over a split vocabulary, row by row and in chunks of rows.

With `lse` the logarithm of the sum of exponentials over the whole vocabulary of `V` entries, `t`
the logit of the label and `ε` the label smoothing, the loss of one row of logits `x` is

    lse − (1 − ε) t − ε/V Σ x + z lse²

and its gradient `(1 + 2 z lse) exp(x − lse) − (1 − ε) [x is the label's] − ε/V`. A rank needs its
own slice of `x` and a few numbers a row, so no rank ever holds a row of the whole vocabulary;
exponentials are made for a few rows at a time, so that none but the gradient is as large as the
slice.

Source:
    Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3: the loss of a split vocabulary takes
    the ranks' maxima and sums. Szegedy et al. (arXiv 1512.00567), section 7: label smoothing.
    Chowdhery et al., PaLM (arXiv 2204.02311), section 5, after de Brébisson and Vincent: z-loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from plait.comm.once import first_order
from plait.loss.vocabulary import Vocabulary

CHUNK = 1 << 20
"""Elements of a temporary on the CPU; on an accelerator 16 times as many."""


@dataclass(frozen=True)
class Terms:
    """What is added to the plain loss of a token.

    Attributes:
        label_smoothing: The share of the target that is spread over the vocabulary.
        z_loss: The weight of the squared logarithm of the normaliser.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over the vocabulary are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_losses(
    x_local: Tensor, labels: Tensor, valid: Tensor, vocabulary: Vocabulary, terms: Terms
) -> Tensor:
    """The loss of every token.

    Args:
        x_local: `[tokens, vocab_local]`, this rank's slice of the logits.
        labels: `[tokens]`, indices into the whole vocabulary, the same on every rank.
        valid: `[tokens]`, which labels count; the others may be any number.
        vocabulary: Which entries each rank holds.
        terms: What is added.

    Returns:
        `[tokens]`, 0 where a label does not count, the same on every rank; float32, of float64
        logits float64.

    Comm:
        Forward two all-reduces, of one number a token (the maximum) and of two (of three with label
        smoothing); backward nothing.
    """
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        x_local, labels, valid, vocabulary, terms
    )
    return losses


def logsumexp(x_local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The logarithm of the sum of exponentials over the whole vocabulary.

    Args:
        x_local: `[tokens, vocab_local]`, this rank's slice of the logits.
        vocabulary: Which entries each rank holds.

    Returns:
        `[tokens]`, the same on every rank; float32, of float64 logits float64.

    Comm:
        Forward two all-reduces of one number a token; backward nothing.
    """
    found: Tensor = _LogSumExp.apply(x_local, vocabulary)  # type: ignore[no-untyped-call]
    return found


def _chunks(x: Tensor) -> Iterator[slice]:
    elements = CHUNK if x.device.type == "cpu" else 16 * CHUNK
    rows = max(1, elements // max(1, x.shape[1]))
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def _maximum(x: Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> Tensor:
    if x.shape[1] == 0:
        biggest = x.new_full((x.shape[0],), float("-inf"), dtype=dtype)
    else:
        biggest = x.amax(-1).to(dtype)
    return vocabulary.reduce(biggest, "max")


def _exponentials(x: Tensor, shift: Tensor) -> Tensor:
    """`exp(x - shift)` of some rows, in the dtype of `shift`; new memory."""
    return torch.sub(x, shift.unsqueeze(-1)).exp_()


class _TokenLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, valid: Tensor, vocabulary: Vocabulary, terms: Terms
    ) -> Tensor:
        dtype, smoothing = accumulation_dtype(x.dtype), terms.label_smoothing
        biggest = _maximum(x, vocabulary, dtype)
        inside = valid & (labels >= vocabulary.start)
        inside = inside & (labels < vocabulary.start + vocabulary.local)
        here = (labels - vocabulary.start).masked_fill_(~inside, 0)
        parts = x.new_zeros((3 if smoothing else 2, x.shape[0]), dtype=dtype)
        if x.shape[1]:
            for rows in _chunks(x):
                parts[0, rows] = _exponentials(x[rows], biggest[rows]).sum(-1)
                if smoothing:
                    parts[2, rows] = x[rows].to(dtype).sum(-1)
            logit = x.gather(1, here.unsqueeze(-1)).squeeze(-1).to(dtype)
            parts[1] = logit.masked_fill(~inside, 0)
        parts = vocabulary.reduce(parts)
        lse = biggest + parts[0].log()
        losses = lse - (1 - smoothing) * parts[1]
        if smoothing:
            losses -= smoothing / vocabulary.whole * parts[2]
        if terms.z_loss:
            losses += terms.z_loss * lse.square()
        ctx.save_for_backward(x, lse, here, inside, valid)
        ctx.terms, ctx.whole = terms, vocabulary.whole
        return losses.masked_fill_(~valid, 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, lse, here, inside, valid = ctx.saved_tensors
        terms: Terms = ctx.terms
        grad = grad.to(lse.dtype).masked_fill(~valid, 0)  # 0 / 0 tokens is no gradient
        by_softmax = grad * (1 + 2 * terms.z_loss * lse) if terms.z_loss else grad
        by_label = (grad * (terms.label_smoothing - 1)).masked_fill_(~inside, 0).unsqueeze(-1)
        spread = (grad * (terms.label_smoothing / ctx.whole)).unsqueeze(-1)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in _chunks(x) if x.shape[1] else ():
            made = _exponentials_into(out[rows], x[rows], lse[rows])
            made.mul_(by_softmax[rows].unsqueeze(-1))
            if terms.label_smoothing:
                made.sub_(spread[rows])
            made.scatter_add_(1, here[rows].unsqueeze(-1), by_label[rows])
            if made.dtype != out.dtype:
                out[rows] = made
        return out, None, None, None, None


def _exponentials_into(out: Tensor, x: Tensor, shift: Tensor) -> Tensor:
    """As `_exponentials`, in the memory of `out` where that has the dtype."""
    if out.dtype != shift.dtype:
        return _exponentials(x, shift)
    return torch.sub(x, shift.unsqueeze(-1), out=out).exp_()


class _LogSumExp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        biggest = _maximum(x, vocabulary, accumulation_dtype(x.dtype))
        # Where all is -inf (or something inf) nothing can be subtracted.
        shift = biggest.masked_fill(~biggest.isfinite(), 0)
        total = torch.zeros_like(shift)
        for rows in _chunks(x) if x.shape[1] else ():
            total[rows] = _exponentials(x[rows], shift[rows]).sum(-1)
        lse = shift + vocabulary.reduce(total).log()
        ctx.save_for_backward(x, lse)
        return lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, lse = ctx.saved_tensors
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in _chunks(x) if x.shape[1] else ():
            made = _exponentials_into(out[rows], x[rows], lse[rows])
            made.mul_(grad[rows].to(made.dtype).unsqueeze(-1))
            if made.dtype != out.dtype:
                out[rows] = made
        return out, None
