"""What is said about a model's answers, token by token, over a vocabulary that may be split."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.loss.kernel import Terms, logsumexp, token_losses
from plait.loss.logits import SplitLogits
from plait.loss.over_vocabulary import argmax
from plait.loss.vocabulary import Vocabulary


@dataclass(frozen=True)
class Scores:
    """Of every token `[...]`, on each rank that holds a slice; 0 where a label does not count.

    Attributes:
        log_probs: The logarithm of the label's probability, with a gradient.
        entropy: `−Σ p log p` over the whole vocabulary, without one.
        is_largest: Whether the label has the largest logit, the first one of equal ones.
        valid: Which labels count.
    """

    log_probs: Tensor
    entropy: Tensor
    is_largest: Tensor
    valid: Tensor


def scores(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Scores:
    """Scores of this rank's own tokens: nothing is summed up over tokens or data ranks.

    Args:
        logits: `[..., vocab]`, `SplitLogits` or whole.
        labels: `[...]`, the same on every rank that holds a slice.
        ignore_index: The label of tokens that do not count.

    Returns:
        The scores; numbers are float32, of float64 logits float64.

    Comm:
        Over the vocabulary's ranks five all-reduces of one or two numbers a token, and one
        all-gather of two; backward nothing.
    """
    settled = logits.settled() if isinstance(logits, SplitLogits) else logits
    if isinstance(settled, SplitLogits) and settled.vocabulary_dim == -1:
        x, vocabulary = settled.local, settled.vocabulary
    else:
        x = settled.whole() if isinstance(settled, SplitLogits) else settled
        vocabulary = Vocabulary((x.shape[-1],))
    x, shape = x.reshape(labels.numel(), x.shape[-1]), labels.shape
    rows = labels.reshape(-1)
    valid = rows != ignore_index
    losses = token_losses(x, rows, valid, vocabulary, Terms())
    with torch.no_grad():
        entropy = _entropy(x.detach(), vocabulary).masked_fill_(~valid, 0)
        best = _best(x.detach(), vocabulary)
    is_largest = (best == rows) & valid
    return Scores(*(part.view(shape) for part in (-losses, entropy, is_largest, valid)))


def _entropy(x: Tensor, vocabulary: Vocabulary) -> Tensor:
    """`log Σ exp x − Σ p x` of each row, whose exponentials are made for one row at a time."""
    lse = logsumexp(x, vocabulary)
    mean = torch.zeros_like(lse)
    step = max(1, (1 << 20) // max(1, x.shape[1]))
    for start in range(0, x.shape[0] if x.shape[1] else 0, step):
        rows = slice(start, start + step)
        part = x[rows].to(lse.dtype)
        probs = (part - lse[rows].unsqueeze(-1)).exp_()
        mean[rows] = probs.mul_(part).masked_fill_(part == float("-inf"), 0).sum(-1)
    return lse - vocabulary.reduce(mean)


def _best(x: Tensor, vocabulary: Vocabulary) -> Tensor:
    split = SplitLogits.of(x, vocabulary)
    found = argmax(torch.argmax, (split, -1), {})
    if found is NotImplemented:  # a rank without an entry
        found = split.whole().argmax(-1)
    best: Tensor = found
    return best
