"""The forward of a split module as a whole: what fails on one rank is told to the others."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait import surgery
from plait.attention import shared
from plait.build.visits import same_path
from plait.comm import announce_failure
from plait.consistency import guard
from plait.hf.attention import entered
from plait.loss import asking
from plait.loss.asking import ALONE
from plait.run import torch_private
from plait.state import state_of
from plait.styles import randomness
from plait.styles.layer import rebind

_INNER = "_plait_inner_forward"
_CALLED = "_plait_called"  # on a sharded module: whether FSDP knows of the forward that begins
_WATCH = "_plait_watch"  # what surgery remembers; another object after a module was exchanged


def _root_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    called = module.__dict__.get(_CALLED)
    if called is False:  # PEFT runs a model's forward without calling the model
        return module(*args, **kwargs)
    if called:
        module.__dict__[_CALLED] = False
    try:
        surgery.adopt_new(module)  # a head that was put in since; see docs/how-to/surgery.md
        if randomness.drops_in(module, module.__dict__.get(_WATCH)):
            state = state_of(module)
            assert state is not None
            meshes = state.tp_mesh, state.data_mesh
            return randomness.call_agreed(module, meshes, _inner, module, *args, **kwargs)
        return _inner(module, *args, **kwargs)
    except Exception as error:
        state = state_of(module)
        if state is not None:
            announce_failure(state.tp_mesh, error)
            if state.data_mesh is not None and not module.__dict__.get(ALONE):
                announce_failure(state.data_mesh, error)
        raise


def _inner(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner, state = module.__dict__[_INNER], state_of(module)
    forward = inner if inner is not None else partial(type(module).forward, module)
    data_mesh = state.data_mesh if state is not None else None
    axes = state.sequences if state is not None else None
    if axes is not None and not module.__dict__.get(ALONE):
        return _share(module, forward, args, kwargs)
    with same_path(module):
        return asking.call(module, forward, args, kwargs, data_mesh)


def _share_sequences(
    module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward, on this rank's tokens of sequences that others hold the rest of."""
    state = state_of(module)
    assert state is not None and state.sequences is not None
    kwargs, found = entered(module, args, kwargs, state.sequences)
    with same_path(module), shared(found):
        return asking.call(module, forward, (), kwargs, state.data_mesh)


_share = torch.compiler.disable(
    _share_sequences,
    reason="the ranks tell each other which tokens they hold; compile the layers of the model",
)


def expect_calls(module: nn.Module) -> None:
    """Make a forward that is run without a call of the module a call: FSDP gathers parameters then.

    Args:
        module: The module, after FSDP has sharded it.
    """
    module.__dict__[_CALLED] = False
    module.register_forward_pre_hook(_note_call, prepend=True)  # before FSDP gathers


def _note_call(module: nn.Module, args: Any) -> None:
    module.__dict__[_CALLED] = True
    if not torch.compiler.is_compiling() and torch_private.forget_failed_backward(module):
        for part in module.modules():
            if isinstance(part, FSDPModule):
                torch_private.drop_unreduced(part)


def install_root(module: nn.Module) -> None:
    """Make a failure in the module's forward on one rank an error on all that wait for it.

    Args:
        module: The module that was split; the last thing done to its forward.
    """
    module.__dict__[_INNER] = module.__dict__.get("forward")
    rebind(module, _root_forward)
    surgery.install(module)
    randomness.drops_in(module, module.__dict__.get(_WATCH))  # looked for before any compilation
    state = state_of(module)
    every = getattr(state.config, "consistency_guard", False) if state is not None else False
    if every:
        guard(module, every=int(every))
