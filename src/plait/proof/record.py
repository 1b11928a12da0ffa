"""What every module takes and gives while a model runs, in the order in which it happens."""

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.proof.numbers import tensors

Side = Literal["in", "out", "grad_out", "grad_in"]


class Key(NamedTuple):
    """One tensor at the border of one call of a module.

    Attributes:
        module: The module's name.
        call: Number of the call, from 0.
        side: What goes in, what comes out, or the gradient of either.
        path: Which of the tensors there.
    """

    module: str
    call: int
    side: Side
    path: str


@dataclass
class Record:
    """What happened in one run.

    Attributes:
        tensors: Copies of the tensors in order of execution; local ones where a model is split.
        callers: Module name → the module whose code called it, of the latest call.
        origins: Where a tensor was first seen that some module takes or gives: a module that passes
            on what another has made has no part in it.
        inside: Modules that were called and have not returned, the outermost first.
        embedding_grads: Gradient of what each watched module gave.
    """

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    callers: dict[str, str] = field(default_factory=dict)
    origins: dict[Key, Key] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    embedding_grads: dict[str, torch.Tensor] = field(default_factory=dict)


class Recorder:
    """Context in which the calls of a model's modules are recorded.

    Args:
        model: The model.
        taps: Also record gradients on both sides of every call. Every module then gets its input as
            a copy, so that its gradient is its own and not the sum over all who use the tensor.
    """

    def __init__(self, model: nn.Module, taps: bool = False) -> None:
        self.model = model
        self.taps = taps
        self.record = Record()
        self._calls: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], Key]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Record:
        for name, module in self.model.named_modules():
            before, after = _Before(self, name), _After(self, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        return self.record

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Note a call and what it takes."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self.record.callers[name] = self._open[-1][0] if self._open else ""
        self._open.append((name, call))
        self.record.inside = [n for n, _ in self._open]
        self._note(name, call, "in", (args, kwargs))
        if self.taps and torch.is_grad_enabled():
            args, kwargs = self._tap((args, kwargs), Key(name, call, "grad_in", ""))
            return args, kwargs
        return None

    def returned(self, name: str, module: nn.Module, output: Any) -> Any:
        """Note what a call gives."""
        while self._open and self._open[-1][0] != name:  # left by an exception that was caught
            self._open.pop()
        call = self._open.pop()[1] if self._open else 0
        self.record.inside = [n for n, _ in self._open]
        self._note(name, call, "out", output)
        if isinstance(module, nn.Embedding) and isinstance(output, torch.Tensor):
            self._watch(name, output)
        if self.taps and torch.is_grad_enabled():
            return self._tap(output, Key(name, call, "grad_out", ""))
        return None

    def _note(self, name: str, call: int, side: Side, value: Any) -> None:
        for path, x in tensors(value):
            if not x.is_floating_point():
                continue
            key = Key(name, call, side, path)
            seen = self._seen.get(id(x))
            if seen is not None and seen[0]() is x:
                self.record.origins[key] = seen[1]
            else:
                self._seen[id(x)] = (weakref.ref(x), key)
            self.record.tensors[key] = _local(x).clone()

    def _watch(self, name: str, output: torch.Tensor) -> None:
        if not output.requires_grad:
            return
        grads = self.record.embedding_grads

        def keep(grad: torch.Tensor) -> None:
            grads[name] = _local(grad).clone()

        output.register_hook(keep)

    def _tap(self, value: Any, key: Key) -> Any:
        """`value` with its tensors exchanged for copies whose gradients are recorded."""
        if isinstance(value, torch.Tensor):
            if not value.requires_grad or isinstance(value, DTensor):
                return value
            at = key._replace(path=key.path or "output")
            return _Tap.apply(value, self.record.tensors, at)  # type: ignore[no-untyped-call]
        if isinstance(value, Mapping):
            tapped = copy.copy(value)
            for name in list(value):
                if isinstance(value[name], torch.Tensor | tuple | list):
                    path = f"{key.path}.{name}".lstrip(".")
                    tapped[name] = self._tap(value[name], key._replace(path=path))  # type: ignore[index]
            return tapped
        if type(value) in (tuple, list):
            parts = [
                self._tap(x, key._replace(path=f"{key.path}[{n}]")) for n, x in enumerate(value)
            ]
            return type(value)(parts)
        return value


class _Before:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.recorder.called(self.name, args, kwargs)


class _After:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.recorder.returned(self.name, module, output)


class _Tap(torch.autograd.Function):
    """The identity; notes the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, notes: dict[Key, torch.Tensor], key: Key) -> Any:
        ctx.notes, ctx.key = notes, key
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.notes[ctx.key] = _local(grads[0]).clone()
        return grads[0], None, None


def _local(x: torch.Tensor) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()
