"""Functions of torch by name: the same thing is a method, a function, or one of `functional`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_OWNERS = (Tensor, torch, F)


def functions(names: str) -> list[Any]:
    """All that go by these names, which are separated by spaces."""
    found = (getattr(owner, name, None) for name in names.split() for owner in _OWNERS)
    return [x for x in found if x is not None]


def attributes(names: str, kind: str = "__get__") -> list[Any]:
    """How `__torch_function__` sees that attributes of a tensor are read (or, `__set__`, set)."""
    classes = (vars(Tensor), vars(torch._C.TensorBase))
    found = [next((x[name] for x in classes if name in x), None) for name in names.split()]
    return [getattr(x, kind) for x in found if x is not None and hasattr(x, kind)]
