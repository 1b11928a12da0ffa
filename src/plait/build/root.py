"""The forward of a split module as a whole: what fails on one rank is told to the others."""

from typing import Any

from torch import nn

from plait import surgery
from plait.comm import announce_failure
from plait.consistency import guard
from plait.state import state_of
from plait.styles.layer import rebind

_INNER = "_plait_inner_forward"


def _root_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        surgery.adopt_new(module)  # a head that was put in since; see docs/how-to/surgery.md
        inner = module.__dict__[_INNER]
        if inner is not None:
            return inner(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)
    except Exception as error:
        state = state_of(module)
        if state is not None:
            announce_failure(state.tp_mesh, error)
        raise


def install_root(module: nn.Module) -> None:
    """Make a failure in the module's forward on one rank an error on all that wait for it.

    Args:
        module: The module that was split; the last thing done to its forward.
    """
    module.__dict__[_INNER] = module.__dict__.get("forward")
    rebind(module, _root_forward)
    surgery.install(module)
    state = state_of(module)
    every = getattr(state.config, "consistency_guard", False) if state is not None else False
    if every:
        guard(module, every=int(every))
