"""Ctrl-C: the step is finished, a checkpoint is written, then the run ends."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside, the first Ctrl-C (or SIGTERM) only sets `asked`; the second ends the process.

    Args:
        shown: Whether to say so.

    Attributes:
        asked: Whether somebody wants the run to end after this step.
    """

    def __init__(self, shown: bool) -> None:
        self.asked, self._shown = False, shown
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._shown:
            sys.stderr.write("stopping after this step; the same again stops at once\n")
