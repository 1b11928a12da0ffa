"""Attention over long and packed sequences, on one rank or shared by many.

Masks are descriptions (`masks`) of which only the blocks that somebody sees are computed (`work`,
`kernels`). Ranks that share a sequence trade tokens for heads (`ulysses`), pass keys and values
around a ring (`ring`), or both (`over_ranks`).
"""

from plait.attention.kernels import Settings
from plait.attention.local import attend
from plait.attention.masks import MaskSpec, segments_of
from plait.attention.over_ranks import attend_over_ranks
from plait.attention.sharing import SharedSequences, current, documents_of, meet, shared
from plait.attention.spans import Tokens, places_of
from plait.attention.work import Work, work_of

__all__ = [
    "MaskSpec",
    "Settings",
    "SharedSequences",
    "Tokens",
    "Work",
    "attend",
    "attend_over_ranks",
    "current",
    "documents_of",
    "meet",
    "places_of",
    "segments_of",
    "shared",
    "work_of",
]
