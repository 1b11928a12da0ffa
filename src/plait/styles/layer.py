"""What a style is: seven hooks that say how one module is cut and what happens at its border."""

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait.errors import PlaitError
from plait.plan.intervals import ParamLayout
from plait.styles.params import GradMode, LocalParams

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Border:
    """What one module needs at each call: its style, the axis, and the forward it had before.

    A deep copy of the module gets a border of its own around its own forward; mesh and style are
    shared.

    Attributes:
        style: The module's style.
        mesh: The axis.
        forward: A forward that was set on the instance, or None: the class's.
        grads: Gradient modes of single parameters, from rules that name them.
    """

    __slots__ = ("forward", "grads", "mesh", "style")

    def __init__(
        self, style: "TensorParallelLayer", mesh: DeviceMesh, forward: Callable[..., Any] | None
    ) -> None:
        self.style = style
        self.mesh = mesh
        self.forward = forward
        self.grads: dict[str, GradMode] = {}

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module had before the style came."""
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Border":
        copied = Border(self.style, self.mesh, copy.deepcopy(self.forward, memo))
        copied.grads = copy.deepcopy(self.grads, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        raise PlaitError(
            "Pickling a module that is split over ranks (torch.save of the whole module):",
            "process groups cannot be stored",
            [
                "model.save_pretrained(directory), for models of transformers",
                "torch.save(plait.full_state_dict(module), file)",
            ],
        )


def bind_forward(
    module: nn.Module,
    style: "TensorParallelLayer",
    mesh: DeviceMesh,
    forward: Callable[..., Any],
) -> nn.Module:
    """Make `forward(module, *args, **kwargs)` the module's forward, in place.

    The new forward is a bound method and not a closure, so `copy.deepcopy` of the module binds the
    copy's to the copy. It shows the signature of the module's own.
    """
    border = Border(style, mesh, module.__dict__.get("forward"))
    module.__dict__["_plait_border"] = border
    rebind(module, forward)
    return module


def rebind(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Set `forward` as the instance's forward, with the signature of the class's."""
    shown = _showing(forward, type(module).forward)
    module.__dict__["forward"] = types.MethodType(shown, module)


@lru_cache(maxsize=4096)
def _showing(forward: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that shows the signature of another; no frame more at each call."""
    assert isinstance(forward, types.FunctionType)
    shown = types.FunctionType(
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    shown.__kwdefaults__ = forward.__kwdefaults__
    shown.__wrapped__ = original  # type: ignore[attr-defined]
    return shown


def border_of(module: nn.Module) -> Border:
    """The border that `bind_forward` left on `module`."""
    border: Border = module.__dict__["_plait_border"]
    return border


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    border: Border = module.__dict__["_plait_border"]
    style, mesh = border.style, border.mesh
    args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
    with style.context_around_forward(module, mesh):
        output = border.call(module, *args, **kwargs)
    return style.transform_output_post_forward(module, output, mesh)


def hooks_are(style: "TensorParallelLayer", base: type["TensorParallelLayer"]) -> bool:
    """Whether `style` has the call-time hooks of `base`: a fused forward may stand for them."""
    return all(
        getattr(type(style), hook) is getattr(base, hook)
        for hook in (
            "transform_inputs_pre_forward",
            "context_around_forward",
            "transform_output_post_forward",
            "should_use_local_tensors",
            "param_grads",
        )
    )


def first_input(
    module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[Args, Kwargs]]]:
    """The main input of a module, and how to put another in its place.

    It is the first positional argument, or the keyword that the forward's signature names first.
    """
    if args:
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    name = _first_parameter(type(module).forward)
    if name not in kwargs:
        name = next(iter(kwargs))
    return kwargs[name], lambda x: ((), {**kwargs, name: x})


@lru_cache(maxsize=4096)
def _first_parameter(forward: Callable[..., Any]) -> str:
    names = list(inspect.signature(forward).parameters)
    return names[1] if len(names) > 1 else ""


class TensorParallelLayer:
    """A parallel style. Subclass it, override any hook, register an instance, name it in a plan.

    A style has no state of its own: one instance serves every module that names it. The hooks are
    called in this order, on every rank of the axis alike:

    1. `validate_param`, once for each parameter of each module, before anything is changed.
    2. `shard_param`, once for each parameter; on meta tensors when a checkpoint is loaded.
    3. `install_forward`, once for each module.
    4. At each call: `transform_inputs_pre_forward`, then the module's own forward inside
       `context_around_forward`, then `transform_output_post_forward`.

    A parameter that `shard_param` leaves alone becomes a DTensor that every rank holds whole; the
    forward always sees such a parameter as a plain tensor.
    """

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Check a module before anything is changed.

        Raises:
            PlanError: The style cannot work on this module.
        """

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Check one parameter before anything is changed.

        Args:
            module: The module that holds it.
            param: Its name in the module.
            mesh: The axis it would be cut over.
            parameter_name: Its full name, for messages.

        Raises:
            PlanError: The style cannot cut this parameter.
        """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Replace one parameter of `module` by a DTensor. Default: leave it whole."""

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """Index ranges that each rank holds, where the placement alone cannot say it.

        Called before `shard_param`. Default: None, the placement says it.
        """
        return None

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Whether the module's forward sees the parameters that the style cut as local tensors."""
        return False

    def param_grads(self, module: nn.Module) -> Mapping[str, GradMode]:
        """Parameters whose gradient on each rank is only a term: they are summed over the axis."""
        return {}

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Bring the inputs to the layout that the forward works on."""
        return args, kwargs

    def context_around_forward(
        self, module: nn.Module, mesh: DeviceMesh
    ) -> AbstractContextManager[Any]:
        """Context in which the module's own forward runs."""
        if self.should_use_local_tensors(module) or not _is_cut(module):
            return LocalParams(module, self.grads_of(module))
        return contextlib.nullcontext()

    def grads_of(self, module: nn.Module) -> Mapping[str, GradMode]:
        """Gradient modes of a module's parameters: the style's, and those of single rules."""
        border = module.__dict__.get("_plait_border")
        single = border.grads if border is not None else None
        return {**self.param_grads(module), **single} if single else self.param_grads(module)

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Bring the output to the layout that the next module expects."""
        return output

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the three call-time hooks around the module's forward, in place."""
        return bind_forward(module, self, mesh, _hooked_forward)


def _is_cut(module: nn.Module) -> bool:
    return any(
        isinstance(param, DTensor) and not all(p.is_replicate() for p in param.placements)
        for param in module._parameters.values()
    )
