"""Checking of plait's annotations, shapes included, while tests run; ordinary use pays nothing."""

import importlib.util
from collections.abc import Callable
from typing import Any

CHECKED = (
    "run", "shapes", "plan", "mesh", "comm", "styles", "weights", "surgery", "consistency", "hf",
    "proof", "build", "testing",
)  # fmt: skip
"""Rooms whose annotations are checked. `layout` and `auto` are not among them: they take a user's
arguments of any type and refuse the wrong ones in words, which a check would forestall."""

_state = {"on": False}


def install() -> bool:
    """Check calls into plait against their annotations from here on, in this process and in ranks.

    Must run before the rooms it should cover are imported: modules imported earlier stay as they
    are. The ranks of a pool started afterwards check too.

    Returns:
        True when checking is on; False when jaxtyping or beartype is not installed.
    """
    if _state["on"]:
        return True
    if not (importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype")):
        return False
    from jaxtyping import install_import_hook

    install_import_hook([f"plait.{room}" for room in CHECKED], f"{__name__}.check")
    _state["on"] = True
    return True


def check(checked: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, with an int taken where a float is annotated, as type checkers do (PEP 484).

    Hints that beartype cannot evaluate here (`Self` outside its class, a name that only type
    checkers import) are not checked.
    """
    from beartype import BeartypeConf, beartype
    from beartype.door import is_bearable
    from beartype.roar import BeartypeException

    nothing = object()
    for name, hint in getattr(checked, "__annotations__", {}).items():
        try:
            is_bearable(nothing, hint)  # fits no hint, so every part of it is looked at
        except BeartypeException:
            checked.__annotations__[name] = Any
    result: Callable[..., Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))(checked)
    return result


def installed() -> bool:
    """Whether [`install`][plait.testing.typecheck.install] has run in this process."""
    return _state["on"]
