"""Errors that the other ranks have heard of, so that one failure is announced once."""

from typing import TypeVar

_MARK = "_plait_announced"
_Error = TypeVar("_Error", bound=BaseException)


def mark_announced(error: _Error) -> _Error:
    """Note on an error that the other ranks of its axis know of it; returns the error."""
    error.__dict__[_MARK] = True
    return error


def is_announced(error: BaseException) -> bool:
    """Whether the other ranks know of this error, or of the one it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if _MARK in cause.__dict__:
            return True
        cause = cause.__cause__
    return False
