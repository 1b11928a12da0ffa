"""Labels that know who else has some: a loss of them is one over the tokens of all data ranks."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map_only

from plait.loss.naming import functions


@dataclass
class Record:
    """The losses of one call of a model.

    Attributes:
        data_mesh: The ranks that see other tokens; None: there are none.
        counts: Of how many tokens each loss is.
    """

    data_mesh: DeviceMesh | None = None
    counts: list[Tensor] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Record":
        return Record(self.data_mesh)  # a mesh cannot be copied


class Labels(Tensor):
    """Labels in the forward of a model, which reach its loss: shifted, flattened, masked.

    A plain tensor of labels in all but that cross entropy with them is over the tokens of all data
    ranks. What is computed from them and is no floating-point number is labels too.
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
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            from plait.loss.over_vocabulary import ANSWERS

            return ANSWERS[func](func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _MEMORY or not _holds_whole_numbers(result):
            return result
        record = next(x.record for x in tree_flatten((args, kwargs))[0] if isinstance(x, Labels))
        return tree_map_only(Tensor, lambda x: _labels(x, record), result)


def _labels(x: Tensor, record: Record) -> Tensor:
    if isinstance(x, Labels) or x.is_floating_point() or type(x) is not Tensor:
        return x
    return Labels.of(x, record)


def _holds_whole_numbers(result: Any) -> bool:
    if isinstance(result, Tensor):
        return not result.is_floating_point()
    return isinstance(result, tuple | list) and any(isinstance(x, Tensor) for x in result)


_MEMORY = frozenset(
    functions(
        "new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like "
        "as_subclass"
    )
)
"""Functions that take a shape of labels, or their class away."""
