"""Show that a check can fail: break what it checks and see it fail."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def patched(target: Any, attribute: str, replacement: Any) -> Iterator[None]:
    """Inside, `target.attribute` is `replacement`; afterwards it is as it was."""
    had_own = attribute in vars(target)
    original = getattr(target, attribute)
    setattr(target, attribute, replacement)
    try:
        yield
    finally:
        if had_own:
            setattr(target, attribute, original)
        else:  # it came from a class or a parent; leave no copy behind
            delattr(target, attribute)


@contextlib.contextmanager
def must_fail(
    target: Any,
    attribute: str,
    replacement: Any,
    raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
) -> Iterator[None]:
    """Assert that the body fails while `target.attribute` is `replacement`.

    ```python
    check()  # passes
    with mutation.must_fail(linear, "sum_from", lambda x, mesh: x):
        check()
    ```

    Name the module that looks the attribute up, not the one that defines it. On several ranks it is
    enough that one of them notices; they agree on it at the end, so a body must not stop between
    collectives that its peers still enter.

    Args:
        target: Module, class or object to patch.
        attribute: Name of what is replaced.
        replacement: The broken version.
        raises: What counts as the check failing.

    Raises:
        AssertionError: The body passed on every rank, so the check does not check this.

    Comm: one all-reduce of one number over the default group, if there is one.
    """
    noticed = False
    with patched(target, attribute, replacement):
        try:
            yield
        except raises:
            noticed = True
    if dist.is_available() and dist.is_initialized():
        flag = torch.tensor([int(noticed)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        noticed = bool(flag.item())
    if not noticed:
        owner = getattr(target, "__name__", type(target).__name__)
        raise AssertionError(f"nothing noticed that {owner}.{attribute} was broken")
