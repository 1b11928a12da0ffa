"""The parameters of a sharded model whole on every data rank for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.loss.asking import ALONE
from plait.run.around import split_module
from plait.state.record import state_of

FREES = "_plait_frees"  # on a group of FSDP that drops its gathered weights after the forward


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, no forward of a sharded model talks to other data ranks.

    For generating and evaluating with different numbers of forwards on the ranks: `generate` does
    it by itself. Tensor-parallel ranks still talk to each other. Only forwards belong inside:
    neither a backward nor a change of parameters.

    Args:
        model: A model that is sharded over data ranks; any other is left as it is.

    Comm:
        On entering, one all-gather over the data ranks for each group of FSDP: all must enter. Each
        rank holds the whole of its tensor-parallel part inside.
    """
    model = split_module(model)
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    state = state_of(model)
    if state is None or not parts:
        yield
        return
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    before = model.__dict__.get(ALONE, False)
    model.__dict__[ALONE] = True
    try:
        yield
    finally:
        model.__dict__[ALONE] = before
        for part in parts:
            if part.__dict__.get(FREES, False):
                part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
