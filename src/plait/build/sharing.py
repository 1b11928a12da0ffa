"""Sequences that ranks share: whether a model allows it, and what it needs for it."""

import contextlib
import inspect
import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait import comm
from plait.attention import current, places_of, shared
from plait.build.proven import Check
from plait.errors import LayoutError, PlanError
from plait.hf import small
from plait.hf.attention import NAME, entered, refuse_unshareable, register
from plait.layout import ParallelismConfig
from plait.loss import asking
from plait.mesh import SequenceAxes
from plait.proof.numbers import exact
from plait.run import environment
from plait.state import own_class

_log = logging.getLogger("plait")
_LENGTH = 13
_TOLERANCE = 1e-9
_LOSS = "its loss is"
_OFF = "cp_size=1 and sp_size=1, with dp_shard_size or tp_size in their place"
_TOLD: list[str] = []
_PROVEN: set[tuple[Any, ...]] = set()
"""What was proven in this process: class, config and sizes."""


def check(module: nn.Module, config: ParallelismConfig) -> None:
    """Refuse what cannot be shared, before anything is changed.

    Raises:
        LayoutError: A setting of the handlers is not built.
        PlanError: The module's attention is none that plait can share.
    """
    handler = config.sp_handler
    kernel = None if handler is None else handler.sp_attn_implementation
    if kernel not in (None, "sdpa"):
        raise LayoutError(
            f"sp_attn_implementation={kernel!r}:",
            "its block kernel is not built in this version of plait",
            "sp_attn_implementation='sdpa', or None",
        )
    refuse_unshareable(module)
    theirs = {"deepspeed": config.sp_backend, "torch": config.cp_backend}
    named = [name for name, given in theirs.items() if name == given]
    if named and environment.world().rank == 0 and not _TOLD:
        _TOLD.append(", ".join(named))
        _log.info("backend %s: plait's own Ulysses and ring attention, under that name", _TOLD[0])


def use_attention(model: Any) -> Any:
    """Let a model's attention be computed by blocks of what its masks allow, on one rank or many.

    Packed documents (positions that begin anew, no attention mask) are then apart, and cost their
    own work. `model.set_attn_implementation("sdpa")` takes it back. Other models are not touched.

    Args:
        model: A model of transformers, split or not. With `cp_size` or `sp_size` above 1
            `parallelize` does it by itself.

    Returns:
        The model itself.

    Raises:
        PlanError: Its attention does not go through transformers' interface.

    Comm: none.
    """
    refuse_unshareable(model)
    register()
    model.set_attn_implementation(NAME)
    return model


def prove(module: nn.Module, axes: SequenceAxes, asked: Check) -> None:
    """Show on a small copy that the ranks compute together what one computes alone.

    Whatever else than attention mixes tokens (convolutions, recurrences, pooling) shows in it.

    Args:
        module: The model.
        axes: The ranks.
        asked: As `check` of `parallelize`; False: nothing is proven.

    Raises:
        PlanError: The copy gives other numbers, or cannot be run; names the first module that does.

    Comm: that of one forward, once for each class, config and sizes in a process.
    """
    kind, config = own_class(module), getattr(module, "config", None)
    key = (kind, repr(config), axes.cp_size, axes.sp_size)
    if asked is False or key in _PROVEN:
        return
    problem = _difference(kind, config, axes)
    told: list[str] = [x for x in comm.exchange(problem, axes.both) if x]
    if told:
        raise PlanError(
            f"cp_size {axes.cp_size} × sp_size {axes.sp_size} for {kind.__name__}:",
            min(told, key=lambda text: text.startswith(_LOSS)),  # a module's name says more
            [_OFF, "check=False: use it as it is"],
        )
    _PROVEN.add(key)


def _difference(kind: type[nn.Module], config: Any, axes: SequenceAxes) -> str:
    """Where a small copy differs when its sequences are shared; empty: nowhere."""
    register()
    try:
        with small.quiet(), exact():
            model: Any = small.small_model(kind, small.small_config(config))
            ids = small.example_batch(model, batch=2, length=_LENGTH)["input_ids"]
            ids = ids[:, :_LENGTH]
            call = {"input_ids": ids}
            expected = _outputs(model, call)
            if "labels" in inspect.signature(type(model).forward).parameters:
                labels = {"labels": ids.masked_fill(ids % 3 == 0, -100)}
                with contextlib.suppress(ValueError, RuntimeError, IndexError):  # of other kinds
                    expected = _outputs(model, call | labels)
                    call |= labels
            model.set_attn_implementation(NAME)
            return _compare(model, call, expected, axes)
    except Exception as error:  # whatever a model's own code raises
        if current() is None and not isinstance(error, PlanError):
            return f"a small copy of it cannot be run on text alone: {_line(error)}"
        return _line(error)


def _compare(
    model: Any,
    call: dict[str, Tensor],
    expected: tuple[dict[str, Tensor], Tensor | None],
    axes: SequenceAxes,
) -> str:
    alone, loss = expected
    ids = call["input_ids"]
    mine = places_of(ids.shape[1], axes.cp_size, axes.sp_size)[axes.place].index()
    own, found = entered(model, (), {key: x[:, mine] for key, x in call.items()}, axes)
    with shared(found):
        together, own_loss = _outputs(model, own, axes)
    for name, x in together.items():
        whole = alone.get(name)
        if whole is None or whole.ndim < 3 or whole.shape[1] != ids.shape[1]:
            if not name:
                return "its output is not one for each token: it is made of several of them"
            continue
        if x.shape[1] != len(mine):
            return f"{name or 'the model'} gives {x.shape[1]} tokens of {len(mine)}"
        size = float(whole.abs().max()) or 1.0
        if len(mine) and float((x - whole[:, mine]).abs().max()) > _TOLERANCE * size:
            return (
                f"{name or 'the model'} ({type(model.get_submodule(name)).__name__}) gives other "
                "numbers on a part of the tokens: it mixes tokens in another way than attention"
            )
    if loss is not None and (own_loss is None or abs(float(own_loss - loss)) > 1e-6):
        return f"{_LOSS} {own_loss}, that of one process {loss}: it is no mean over tokens"
    return ""


@torch.no_grad()
def _outputs(
    model: nn.Module, call: dict[str, Any], axes: SequenceAxes | None = None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """What each module returned, in the order in which they ended; and the loss, of all ranks."""
    found: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(partial(_note, found, name))
        for name, part in model.named_modules()
    ]
    try:
        output = asking.call(model, model, (), call, None if axes is None else axes.both)
    finally:
        for hook in hooks:
            hook.remove()
    return found, getattr(output, "loss", None)


def _note(found: dict[str, Tensor], name: str, part: nn.Module, args: Any, output: Any) -> None:
    """Keep what a module returned: the first tensor, of a model its logits or hidden states."""
    first = output[0] if isinstance(output, tuple) and output else output
    logits = getattr(output, "logits", getattr(output, "last_hidden_state", None))
    value = first if isinstance(first, Tensor) else logits
    if isinstance(value, Tensor):
        found[name] = value.detach().clone()  # what comes next may change it


def _line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
