"""Ordinary changes of a split module: new weights, new dtypes, new modules.

`loading` lets `load_state_dict` take whole tensors, `keeping` lets `to(dtype)` keep what is
recorded on parameters, `fused` lets fused optimizer steps take DTensors, `adopting` makes what was
put in later part of the split; `watching` finds it.
"""

from torch import nn

from plait.surgery.adopting import adopt, adopt_new, refuse_part, refuse_sharded, settled
from plait.surgery.fused import serve_fused_steps
from plait.surgery.keeping import keep_dtype, keep_records
from plait.surgery.loading import take_whole_tensors
from plait.surgery.watching import is_root, is_sharded, watch

__all__ = [
    "adopt",
    "adopt_new",
    "install",
    "is_root",
    "is_sharded",
    "keep_dtype",
    "refuse_part",
    "refuse_sharded",
    "settled",
    "watch",
]


def install(module: nn.Module) -> None:
    """Prepare a module that was just split for ordinary changes; it is the root of what was split.

    Comm: none.
    """
    for part in module.modules():
        keep_records(part)
        take_whole_tensors(part)
    serve_fused_steps()
    watch(module)
