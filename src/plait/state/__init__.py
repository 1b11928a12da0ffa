"""What plait remembers about a module it has split, and the whole tensors behind the split ones."""

from plait.state.gathering import FREES, gathered
from plait.state.pieces import Piece, pieces_of, tp_layout
from plait.state.record import LAYOUT, STATE, ParallelState, own_class, state_of
from plait.state.whole import (
    full_grads,
    full_state_dict,
    gather_whole,
    held_fraction,
    local_part,
    whole_like,
)

__all__ = [
    "FREES",
    "LAYOUT",
    "STATE",
    "ParallelState",
    "Piece",
    "full_grads",
    "full_state_dict",
    "gathered",
    "gather_whole",
    "held_fraction",
    "local_part",
    "own_class",
    "pieces_of",
    "state_of",
    "tp_layout",
    "whole_like",
]
