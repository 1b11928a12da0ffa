"""Cross entropy over a vocabulary that is split, and over the tokens of all data ranks."""

from plait.loss.asking import last_count, split_logits
from plait.loss.entropy import cross_entropy
from plait.loss.logits import SplitLogits
from plait.loss.vocabulary import Vocabulary

__all__ = ["SplitLogits", "Vocabulary", "cross_entropy", "last_count", "split_logits"]
