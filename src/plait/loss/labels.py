"""Labels that know who else has some: a loss of them is one over the tokens of all data ranks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map_only

from plait.loss.naming import attributes, functions

IS_SUM = "_plait_is_sum"
"""Attribute of a loss: whether it is the sum over the tokens of all data ranks."""


@dataclass
class Record:
    """The losses of one call of a model.

    Attributes:
        data_mesh: The ranks that see other tokens; None: there are none.
        counts: Of how many tokens each loss is.
        idle: Whether this rank has no sample of its own: its tokens count in no loss.
        num_items: What the caller says the loss is divided by, the number of all ranks.
    """

    data_mesh: DeviceMesh | None = None
    counts: list[Tensor] = field(default_factory=list)
    idle: bool = False
    num_items: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Record":
        # A mesh cannot be copied.
        return Record(self.data_mesh, idle=self.idle, num_items=self.num_items)


class Labels(Tensor):
    """Labels in the forward of a model, which reach its loss: shifted, flattened, masked.

    A plain tensor of labels in all but that losses with them are over the tokens (or other
    elements) of all data ranks. What is computed from them is labels too: every result that is no
    floating-point number, and those that are one where nothing but labels is in it.
    """

    record: Record

    @staticmethod
    def of(x: Tensor, record: Record) -> "Labels":
        """Labels of this call."""
        made = x.as_subclass(Labels)
        made.record = record
        return made

    def plain(self) -> Tensor:
        """The plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes the loss where it is one; all else is done to plain tensors."""
        from plait.loss.losses import ANSWERS

        kwargs = kwargs or {}
        if func in ANSWERS:
            return ANSWERS[func](func, args, kwargs)
        if func in _DIVISIONS and _is_sum_by_labels(*args):
            from plait.loss.reduction import count_of_all

            return func(args[0], count_of_all(args[1].plain(), args[1].record), **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func in _MEMORY or not _holds_labels(result, given):
            return result
        record = next(x.record for x in given if isinstance(x, Labels))
        floats = all(isinstance(x, Labels) for x in given)
        return tree_map_only(Tensor, lambda x: _labels(x, record, floats), result)


class Placeholder(Tensor):
    """A tensor of a batch that a rank without a sample got, to take part in the step.

    It is an ordinary tensor whose mark goes on to all that is computed from it. A model that is
    called with it regards its labels as ignored, and a loss of it counts nothing.
    """

    source: Tensor | None
    """What a model is called with in its place; the numbers here may be masked for other code."""

    @staticmethod
    def of(x: Tensor, shown: Tensor | None = None) -> "Placeholder":
        """A marked tensor.

        Args:
            x: What a model is called with.
            shown: Other numbers of the same shape, for everybody else.
        """
        made = (x if shown is None else shown).as_subclass(Placeholder)
        made.source = x
        return made

    def plain(self) -> Tensor:
        """What a model is called with, a plain tensor."""
        source: Tensor | None = self.__dict__.get("source")
        if source is not None:
            return source
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        with torch._C.DisableTorchFunctionSubclass():
            shown = self.as_subclass(Tensor).clone()
        return Placeholder.of(self.plain().clone(), shown)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A loss of it counts nothing; all else is done as to any tensor, and stays marked."""
        from plait.loss.losses import ANSWERS

        if func in ANSWERS:
            return ANSWERS[func](func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def record_of(*values: Any) -> Record:
    """To which call these values belong; a new record where there are no labels among them."""
    idle = any(isinstance(x, Placeholder) for x in values)
    found = next((x.record for x in values if isinstance(x, Labels)), None)
    return found if found is not None else Record(idle=idle)


def plain(x: Any) -> Any:
    """A plain tensor in place of labels or a placeholder; anything else as it is."""
    return x.plain() if isinstance(x, Labels | Placeholder) else x


def _is_sum_by_labels(loss: Any, by: Any, *_: Any) -> bool:
    """Whether a sum over all ranks is divided by a number that is of this rank's labels."""
    one = isinstance(by, Labels) and not by.ndim
    return one and isinstance(loss, Tensor) and bool(loss.__dict__.get(IS_SUM))


def _labels(x: Tensor, record: Record, floats: bool) -> Tensor:
    if isinstance(x, Labels) or type(x) is not Tensor or (x.is_floating_point() and not floats):
        return x
    return Labels.of(x, record)


def _holds_labels(result: Any, given: list[Tensor]) -> bool:
    if isinstance(result, Tensor):
        return not result.is_floating_point() or all(isinstance(x, Labels) for x in given)
    return isinstance(result, tuple | list) and any(isinstance(x, Tensor) for x in result)


_DIVISIONS = frozenset(functions("div divide true_divide __truediv__ div_ __itruediv__"))

_MEMORY = frozenset(
    functions(
        "new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like "
        "rand_like randn_like as_subclass"
    )
    + attributes("_base")
)
"""Functions that take a shape of labels, or their class away."""
