"""The guard itself: hooks on a split model's forward and on the optimizers that hold it."""

import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait import comm, surgery
from plait.consistency import fingerprints
from plait.consistency.fingerprints import Entry
from plait.consistency.verdict import Message, judge
from plait.errors import RankError
from plait.state import LAYOUT, own_class, state_of

_GUARD = "_plait_guard"
_TAG = "plait.guard"


def guard(
    model: nn.Module,
    every: int = 1,
    *,
    weights_every: int = 100,
    tolerance: float = 0.0,
    timeout_s: float | None = None,
) -> "Guard":
    """Check at every call of a split model that its ranks do the same; on from now on.

    Compared are: that the ranks come equally often; all arguments of the forward (number, shapes,
    values; in `generate` these are the tokens that were chosen); train and gradient mode; the
    weights that every rank holds whole; at each optimizer step their gradients. The first
    difference is a `RankError` on all ranks, which names the tensor, the ranks and the call.

    Use it as a context, or keep it and call `off()`:

    ```python
    with plait.guard(model):
        train(model)
    ```

    Forwards inside of `torch.compile` are not looked at. A second guard of a model replaces the
    first.

    Args:
        model: A split model; any other is left alone.
        every: Look at every n-th forward and optimizer step.
        weights_every: Look at the whole weights at the first forward and every n-th; 0: never.
        tolerance: How far weights and gradients may be apart, as a fraction of their norm. 0: not
            in one bit, as the ranks' copies should be on one kind of device. GPU kernels that add
            in no fixed order (the backward of an embedding) need about 1e-3.
        timeout_s: How long a rank waits for the others at a check; by default as long as in any
            collective. Ranks of one host that come to another point hear of it at once.

    Returns:
        The guard, switched on.

    Comm:
        One control message for each forward and each optimizer step that is looked at, and one at
        the end.
    """
    return Guard(model, every, weights_every, tolerance, timeout_s)


class Guard:
    """A guard that is on, see [`plait.guard`][plait.consistency.guarding.guard].

    Attributes:
        forwards: Forwards of the model so far.
        steps: Optimizer steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        weights_every: int,
        tolerance: float,
        timeout_s: float | None,
    ) -> None:
        self.model = model
        self.every = max(1, int(every))
        self.weights_every = weights_every
        self.tolerance = tolerance
        self.timeout_s = timeout_s
        self.forwards = self.steps = 0
        state = state_of(model)
        self.mesh = None if state is None or state.tp_mesh.size() == 1 else state.tp_mesh
        self._handles: list[Any] = []
        if self.mesh is None:
            return
        before: Guard | None = model.__dict__.get(_GUARD)
        if before is not None:
            before._remove()
        model.__dict__[_GUARD] = self
        self._handles = [
            model.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True),
            register_optimizer_step_pre_hook(_step_hook(weakref.ref(self))),
        ]
        weakref.finalize(self, self._handles[1].remove)  # the one that is not the model's own

    @property
    def is_on(self) -> bool:
        """Whether it looks."""
        return bool(self._handles)

    def off(self) -> None:
        """Stop looking; all ranks must come here equally far.

        Raises:
            RankError: A rank has called the model, or stepped, more often than another.

        Comm:
            One control message.
        """
        if self.is_on:
            self._remove()
            self._meet("the end of the guard", {})

    def check_weights(self) -> None:
        """Compare the weights that every rank holds whole, now; all ranks must call it.

        Raises:
            RankError: One differs; the first is named.

        Comm:
            One control message.
        """
        self._meet("check_weights()", self._weights())

    def check_gradients(self) -> None:
        """Compare the gradients of the weights that every rank holds whole, now; on all ranks.

        Raises:
            RankError: One differs; the first is named.

        Comm:
            One control message.
        """
        self._meet("check_gradients()", self._gradients())

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.off()
        else:
            self._remove()
            if self.mesh is not None:
                comm.announce_failure(self.mesh, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is not guarded

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare one call of the model, before it runs."""
        surgery.adopt_new(self.model)
        number = self.forwards
        self.forwards += 1
        weights = self.weights_every > 0 and number % self.weights_every == 0
        if number % self.every and not weights:
            return
        entries = fingerprints.modes(self.model.training) | fingerprints.of_call(args, kwargs)
        point = f"forward {number + 1}"
        generation = self.model.__dict__.get("_plait_generation")
        if getattr(generation, "call", None) is not None:
            point += " (of generate(): its inputs are the tokens chosen before)"
        self._meet(point, entries | (self._weights() if weights else {}))

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the gradients before a step of an optimizer of this model."""
        own = {id(param) for param in self.model.parameters()}
        held = (id(param) for group in optimizer.param_groups for param in group["params"])
        if not any(key in own for key in held):
            return  # of another model
        self.steps += 1
        if (self.steps - 1) % self.every == 0:
            self._meet(f"optimizer step {self.steps}", self._gradients())

    def _weights(self) -> dict[str, Entry]:
        return self._whole("parameter", lambda param: param)

    def _gradients(self) -> dict[str, Entry]:
        return self._whole("gradient of", lambda param: param.grad)

    def _whole(self, what: str, pick: Callable[[Tensor], Tensor | None]) -> dict[str, Entry]:
        return {
            f"{what} {name}": fingerprints.of_tensor(pick(param), self.tolerance > 0)
            for name, param in self.model.named_parameters()
            if _is_whole(param)
        }

    def _meet(self, point: str, entries: Mapping[str, Entry]) -> None:
        mesh = self.mesh
        if mesh is None:
            return
        count = f"{self.forwards} forward(s) and {self.steps} optimizer step(s)"
        message = Message(point, count, fingerprints.place(), entries)
        asked = f"The guard of {own_class(self.model).__name__}"
        before = None if self.timeout_s is None else comm.set_timeout(mesh, self.timeout_s)
        try:
            told = comm.exchange((_TAG, None, message), mesh)
        except RankError as error:
            raise comm.mark_announced(
                RankError(
                    f"{asked}: {point}, after {count} ({message.place}).",
                    [error.asked, *error.problems],
                    "call the model and step the optimizer equally often on all ranks",
                    rank=error.rank,
                )
            ) from error
        finally:
            if before is not None:
                comm.set_timeout(mesh, before)
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        messages = [_message(other) for other in told]
        found = judge(asked, messages, ranks, self.tolerance)
        if found is not None:
            raise comm.mark_announced(found)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.model.__dict__.get(_GUARD) is self:
            del self.model.__dict__[_GUARD]


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found: Guard | None = module.__dict__.get(_GUARD)
    if found is not None and not torch.compiler.is_compiling():
        found.before_forward(args, kwargs)


def _step_hook(held: "weakref.ref[Guard]") -> Callable[[Optimizer, Any, Any], None]:
    """A hook of all optimizers that does not keep the guard, and with it the model, alive."""

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = held()
        if found is not None and found.is_on:
            found.before_step(optimizer)

    return before_step


def _message(told: Any) -> Message:
    """What a rank has told, if it is at another exchange than the guard's."""
    if isinstance(told, tuple) and len(told) == 3:
        tag, failure, content = told
        if isinstance(content, Message):
            return content
        return Message(f"{tag!r}" + (f": {failure}" if failure else ""), "?", "?")
    return Message("an exchange of its own", "?", "?")


def _is_whole(param: Tensor) -> bool:
    """Whether every rank should hold the same values."""
    layout = param.__dict__.get(LAYOUT)
    if layout is not None:
        return layout.dim is None
    return not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements)
