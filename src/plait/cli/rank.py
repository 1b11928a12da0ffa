"""`python -m plait.cli.rank`: a rank that `plait` itself started, which reports to its parent."""

import contextlib
import os
import signal
import sys

from plait.cli.app import PARENT_PRINTS, main

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Ask to be told to end when the command that started this rank is killed; on Linux."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed meanwhile
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main(PARENT_PRINTS)
