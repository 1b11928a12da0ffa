"""Models, optimizers and schedulers made ready for a layout, in place and in any order."""

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from plait import build
from plait.consistency import fingerprints
from plait.errors import LayoutError, PlaitError
from plait.layout import factors
from plait.mesh import SequenceAxes
from plait.run import progress
from plait.state import state_of
from plait.train.places import Places

_BOUND = "_plait_step"


class Replaced:
    """Which parameter stands where another one stood, so that optimizers can follow."""

    def __init__(self) -> None:
        self._new: Any = WeakTensorKeyDictionary()

    def note(self, before: dict[str, nn.Parameter], model: nn.Module) -> None:
        """Note what became of a model's parameters.

        Args:
            before: Those that it had, by each of their names.
            model: The model as it is now.
        """
        for name, param in model.named_parameters(remove_duplicate=False):
            old = before.get(name)
            if old is not None and old is not param:
                self._new[old] = param

    def follow(self, optimizer: Optimizer) -> None:
        """Give an optimizer the new parameters in the place of those it holds.

        Raises:
            PlaitError: It has a state for one of them already.
        """
        for group in optimizer.param_groups:
            params = group["params"]
            for position, param in enumerate(params):
                new = self._new.get(param)
                if new is None:
                    continue
                if optimizer.state.get(param):
                    raise PlaitError(
                        f"prepare({type(optimizer).__name__}):",
                        "it has a state for the parameters as they were before the model was split",
                        "prepare the model and the optimizer before the first step",
                    )
                optimizer.state.pop(param, None)
                params[position] = new


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by each of their names, tied ones several times."""
    return dict(model.named_parameters(remove_duplicate=False))


def prepare_model(model: nn.Module, places: Places, replaced: Replaced) -> nn.Module:
    """Split a model over the layout, unless it is already.

    Args:
        model: Split by `from_pretrained` or `parallelize` over the same layout: used as it is. Any
            other: split here. Where its weights differ between the ranks, the first rank's are
            taken, with a line that says so.
        places: The layout.
        replaced: Where the new parameters are noted.

    Returns:
        The model itself.

    Raises:
        LayoutError: It was split over another layout, it is on the meta device, or compiled.

    Comm:
        One control message on each axis, and a broadcast of what differs; those of `parallelize`.
    """
    state = state_of(model)
    name = type(model).__name__
    if state is not None:
        have, want = _sizes(state.mesh), _sizes(places.mesh)
        shared = [
            (x.cp_size, x.sp_size) if x else (1, 1) for x in (state.sequences, places.sequences)
        ]
        if have != want or shared[0] != shared[1]:
            raise LayoutError(
                f"prepare({name}) on {places.layout}:",
                f"it was split over {factors(have) or 'one process'}, the Accelerator has "
                f"{factors(want) or 'one process'}",
                [
                    "give from_pretrained and Accelerator the same config",
                    "prepare the model as it is before it is split",
                ],
            )
        return model
    if hasattr(model, "_orig_mod") and places.mesh is not None:
        raise LayoutError(
            f"prepare({name}) on {places.layout}:",
            "it was compiled before it was split",
            "prepare the model, then torch.compile it",
        )
    before = named(model)
    if any(param.is_meta for param in before.values()):
        raise LayoutError(
            f"prepare({name}) on {places.layout}:",
            "its parameters are on the meta device: there are no weights",
            "load it with plait's from_pretrained(…, distributed_config=…)",
        )
    if not before or places.mesh is None:
        return model.to(places.device)
    if not any(isinstance(param, DTensor) for param in before.values()):
        model.to(places.device)
        before = named(model)
        equalise(model, places)
    build.parallelize(model, places.config, device_mesh=places.mesh)
    replaced.note(before, model)
    return model


def _sizes(mesh: DeviceMesh | None) -> dict[str, int]:
    """The sizes of a mesh by axis; those of 1 are left out."""
    names = () if mesh is None else mesh.mesh_dim_names or ("tp",)
    shape = () if mesh is None else mesh.shape
    return {name: size for name, size in zip(names, shape, strict=True) if size > 1}


def _shared(axes: SequenceAxes | None) -> tuple[int, int]:
    """Over how many ranks sequences are split: cp and sp."""
    return (1, 1) if axes is None else (axes.cp_size, axes.sp_size)


@torch.no_grad()
def equalise(model: nn.Module, places: Places) -> list[str]:
    """Give every rank the first rank's weights and buffers, where they differ.

    Args:
        model: Not split yet.
        places: All ranks of the mesh must call.

    Returns:
        Names of those that differed.

    Raises:
        LayoutError: The ranks have different parameters, not only different values.

    Comm:
        One control message on each axis, and a broadcast on each for every tensor that differs.
    """
    tensors = {**named(model), **dict(model.named_buffers())}
    mine = {name: fingerprints.of_tensor(x)[:2] for name, x in tensors.items()}
    told = places.exchange(mine)
    names = [n for n in told[0] if any(other.get(n) != told[0][n] for other in told)]
    shapes = [
        f"rank {rank} has {other.get(n, ('none',))[0]} for {n!r}, rank 0 has {told[0][n][0]}"
        for rank, other in enumerate(told)
        for n in [*told[0], *(n for n in other if n not in told[0])]
        if n not in told[0] or other.get(n, ("none",))[0] != told[0][n][0]
    ]
    if shapes:
        raise LayoutError(
            f"prepare({type(model).__name__}) on {places.layout}:",
            shapes,
            "build the same model on every rank",
        )
    for name in names:
        tensors[name].copy_(places.broadcast(tensors[name].detach()))
    if names:
        progress.report(
            f"{type(model).__name__}: {len(names)} of {len(tensors)} tensors differed between the "
            f"ranks, {names[0]} first: all have rank 0's now. Seed the ranks alike to make them "
            "equal from the start."
        )
    return names


def bind_step(
    optimizer: Optimizer,
    step: Callable[[Optimizer, Callable[..., Any], dict[str, Any]], Any],
    zero_grad: Callable[[Optimizer, Callable[..., Any], bool], None],
) -> Optimizer:
    """Let an optimizer's `step` and `zero_grad` go through two functions, in place.

    Args:
        optimizer: Bound again, it forgets the functions before.
        step: Called with the optimizer, its own step and the arguments by name.
        zero_grad: Called with the optimizer, its own `zero_grad` and `set_to_none`.
    """
    own_step, own_zero = optimizer.__dict__.get(_BOUND) or (optimizer.step, optimizer.zero_grad)
    optimizer.__dict__[_BOUND] = (own_step, own_zero)

    def bound_step(self: Optimizer, closure: Any = None, **arguments: Any) -> Any:
        given = arguments if closure is None else {**arguments, "closure": closure}
        return step(self, own_step, given)

    def bound_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        zero_grad(self, own_zero, set_to_none)

    # Schedulers of torch look for this mark, and wrap `step.__func__` where they miss it.
    if hasattr(own_step, "_wrapped_by_lr_sched"):
        bound_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = types.MethodType(bound_step, optimizer)
    optimizer.__dict__["zero_grad"] = types.MethodType(bound_zero_grad, optimizer)
    return optimizer


def strangers(optimizer: Optimizer, models: Iterable[nn.Module]) -> int:
    """How many of an optimizer's parameters belong to none of the models."""
    known = {id(param) for model in models for param in model.parameters()}
    return sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])


class PreparedScheduler:
    """A learning-rate scheduler that steps once for each optimizer step.

    Not while gradients are accumulated, and not where the optimizer left its step out because a
    float16 gradient was not finite.

    Attributes:
        scheduler: The user's own.
    """

    def __init__(self, scheduler: Any, steps_now: Callable[[], bool]) -> None:
        self.scheduler, self._steps_now = scheduler, steps_now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("scheduler", "_steps_now"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step, if the optimizer did."""
        if self._steps_now():
            self.scheduler.step(*arguments, **options)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the scheduler itself."""
        self.scheduler.load_state_dict(state)


def is_scheduler(obj: Any) -> bool:
    """Whether an object is a learning-rate scheduler of torch, or looks like one."""
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler | PreparedScheduler):
        return True
    looks = all(callable(getattr(obj, name, None)) for name in ("step", "get_last_lr"))
    return looks and not isinstance(obj, Optimizer | nn.Module)
