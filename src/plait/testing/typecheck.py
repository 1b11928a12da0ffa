"""Checking of plait's annotations, shapes included, while tests run; ordinary use pays nothing."""

import importlib.util
from collections.abc import Callable
from typing import Any

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

    install_import_hook("plait", f"{__name__}.check")
    _state["on"] = True
    return True


def check(checked: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, with an int taken where a float is annotated, as type checkers do (PEP 484)."""
    from beartype import BeartypeConf, beartype

    result: Callable[..., Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))(checked)
    return result


def installed() -> bool:
    """Whether [`install`][plait.testing.typecheck.install] has run in this process."""
    return _state["on"]
