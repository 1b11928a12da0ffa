"""Waiting for a word in shared memory: spin, yield, then sleep in the kernel; and who is alive.

A rank that waits long must not burn the core that its peers need, so after a short spin it sleeps
on a futex, the kernel's wait-until-this-word-changes, and the rank that changes the word wakes it.
x86 lets a store pass a later load of another word, so the waker may miss a rank that is just
falling asleep; sleeps are therefore short (a few milliseconds) and repeated.
"""

import ctypes
import os
import time

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_SYS_FUTEX = 202  # x86-64


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def sleep_on(address: int, value: int, limit_s: float) -> None:
    """Sleep until the word at `address` is no longer `value`, it is woken, or the limit."""
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    _syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_FUTEX_WAIT),
        ctypes.c_long(value & 0xFFFFFFFF),
        ctypes.byref(limit),
        ctypes.c_void_p(None),
        ctypes.c_long(0),
    )


def wake(address: int) -> None:
    """Wake the ranks that sleep on the word at `address`."""
    _syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_FUTEX_WAKE),
        ctypes.c_long(0x7FFFFFFF),
        ctypes.c_void_p(None),
        ctypes.c_void_p(None),
        ctypes.c_long(0),
    )


def birth(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended.

    A process that has ended but has not been collected by its parent counts as ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may hold anything; what follows the last bracket does not.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def pause(turn: int) -> None:
    """Wait a moment between two looks at a slow place, longer from turn to turn."""
    time.sleep(min(0.0002 * 1.3 ** min(turn, 20), 0.01))
