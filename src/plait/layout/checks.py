"""Checks of single field values; each returns the problem in words, or None."""

import difflib
from collections.abc import Iterable, Mapping


def size(name: str, value: object) -> str | None:
    """A size is an int of at least 1; True is not 1 and "2" is not 2."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} must be an int, got {value!r} ({type(value).__name__})"
    if value < 1:
        return f"{name} must be at least 1, got {value}"
    return None


def switch(name: str, value: object) -> str | None:
    """A switch is True or False and nothing that merely looks like it."""
    if type(value) is not bool:
        return f"{name} must be True or False, got {value!r} ({type(value).__name__})"
    return None


def choice(name: str, value: object, allowed: Iterable[str]) -> str | None:
    """One of a few names."""
    allowed = tuple(allowed)
    if value in allowed:
        return None
    return f"{name} must be one of {', '.join(allowed)}; got {value!r}{nearest(value, allowed)}"


def plan(name: str, value: object) -> str | None:
    """A plan is None, "auto", "model" or a dict from pattern to style name."""
    if value is None or value in ("auto", "model"):
        return None
    if not isinstance(value, Mapping):
        return (
            f'{name} must be None, "auto", "model" or a dict of pattern → style, '
            f"got {value!r} ({type(value).__name__})"
        )
    wrong = [
        f"{key!r}: {style!r}"
        for key, style in value.items()
        if not (isinstance(key, str) and isinstance(style, str))
    ]
    if wrong:
        return f"{name} must map str to str, but holds {', '.join(wrong)}"
    return None


def nearest(name: object, allowed: Iterable[str]) -> str:
    """The closest of the allowed names, in brackets after a blank; empty when none is close."""
    found = difflib.get_close_matches(str(name), list(allowed), n=3, cutoff=0.6)
    return f" (nearest: {', '.join(found)})" if found else ""
