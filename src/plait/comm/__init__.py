"""Differentiable collectives on one mesh axis. Nobody else in plait talks to other ranks.

Raw collectives are in `raw`, their differentiable pairs in `pairs`, exchanges of pieces and rings
in `exchanges`, the bridge from DTensor parameters to local tensors in `parameters`, control
messages in `control`, counting in `counting`.
"""

from plait.comm.announced import mark_announced
from plait.comm.control import (
    announce_failure,
    announcing,
    exchange,
    is_linked,
    set_timeout,
    through_torch,
)
from plait.comm.counting import Count, Tally, count
from plait.comm.exchanges import Pending, Ring, all_to_all, exchange_pieces
from plait.comm.pairs import (
    copy_to,
    gather_copy,
    gather_from,
    scatter_sum,
    split_to,
    sum_from,
)
from plait.comm.parameters import local
from plait.comm.raw import (
    all_gather,
    all_gather_sized,
    all_reduce,
    all_reduce_,
    broadcast,
    reduce_scatter,
)
from plait.comm.sizes import chunk_sizes

__all__ = [
    "Count",
    "Pending",
    "Ring",
    "Tally",
    "all_gather",
    "all_gather_sized",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "announce_failure",
    "announcing",
    "broadcast",
    "chunk_sizes",
    "copy_to",
    "count",
    "exchange",
    "exchange_pieces",
    "gather_copy",
    "gather_from",
    "is_linked",
    "local",
    "mark_announced",
    "reduce_scatter",
    "scatter_sum",
    "set_timeout",
    "split_to",
    "sum_from",
    "through_torch",
]
