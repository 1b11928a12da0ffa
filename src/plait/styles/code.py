"""What the code of a module's class does with the parameters of other modules."""

import dis
import inspect
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

_NO_FORWARD = frozenset({"__init__", "_init_weights", "reset_parameters", "extra_repr"})
_HARMLESS = frozenset({"dtype", "device", "shape", "ndim", "requires_grad", "size", "numel"})
_PARAMS = frozenset({"weight", "bias"})
SELF = "self"


@lru_cache(maxsize=4096)
def mentioned(kind: Any, only: frozenset[str] | None = None) -> frozenset[str]:
    """Names of all attributes that the methods of a class mention.

    Args:
        kind: A module class. What torch defines is left out.
        only: Names of the methods that count; None: all.
    """
    names: set[str] = set()
    for key, code in _codes(kind):
        if only is None or key.partition(".")[0] in only:
            names |= set(code.co_names)
    return frozenset(names)


@lru_cache(maxsize=4096)
def reads(kind: Any) -> frozenset[str]:
    """Modules below one whose weight or bias its own code reads: `self.NAME.weight`.

    Reading only the dtype, the device or the shape does not count.

    Args:
        kind: A module class.

    Returns:
        Dotted names as they stand in the code, relative to the module; `"self"` for its own.
    """
    found: set[str] = set()
    itself = ""
    for key, code in _codes(kind):
        itself = next(iter(code.co_varnames), "") if "." not in key else itself
        chain: list[str] = []
        pending, of_self = "", False
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                name = str(step.argval)
                if pending and name not in _HARMLESS:
                    found.add(pending)
                pending = ""
                if name in _PARAMS and (chain or of_self):
                    pending = ".".join(chain) or SELF
                chain.append(name)
                continue
            if pending and step.opname not in ("CACHE", "EXTENDED_ARG"):
                found.add(pending)
                pending = ""
            if step.opname not in ("CACHE", "EXTENDED_ARG"):
                chain = []
                of_self = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
                of_self = of_self and step.argval == itself
    return frozenset(found)


def kind_of(module: nn.Module) -> Any:
    """The class of a module, which is hashable, though torch's stubs deny it."""
    return type(module)


def _codes(kind: Any) -> Iterator[tuple[str, types.CodeType]]:
    """The code of each method, without its decorators, then that of the functions inside it."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            return
        for key, value in vars(base).items():
            function = value.fget if isinstance(value, property) else value
            if key in _NO_FORWARD or not callable(function):
                continue
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, types.CodeType):
                yield key, code
                yield from ((f"{key}.{inner.co_name}", inner) for inner in _inside(code))


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value
            yield from _inside(value)
