"""What the run tells its user: one-line reports and a progress bar, from rank 0 only.

Both go through the logger "plait": `logging.getLogger("plait").setLevel("WARNING")` silences them.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from plait.run import environment

LOGGER = logging.getLogger("plait")


def report(line: str, *, all_ranks: bool = False) -> None:
    """Log one line at INFO level.

    Args:
        line: The text.
        all_ranks: Report from every rank, each line prefixed with its rank.
    """
    place = environment.world()
    if place.rank != 0 and not all_ranks:
        return
    _show_by_default()
    LOGGER.info("%s%s", f"[rank {place.rank}] " if all_ranks else "", line)


@contextlib.contextmanager
def bar(description: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0's terminal; nothing elsewhere.

    Args:
        description: What is going on.
        total: Amount of work.
        unit: "B" shows bytes, anything else is shown after the numbers.

    Yields:
        A function to call with the amount of work done since the last call.
    """
    _show_by_default()
    visible = (
        environment.world().rank == 0
        and LOGGER.isEnabledFor(logging.INFO)
        and sys.stderr.isatty()
        and total > 0
    )
    if not visible:
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

    amount_done = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = ("{task.description}", BarColumn(), amount_done, TextColumn(unit.strip("B")))
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    with shown:
        task = shown.add_task(description, total=total)
        yield lambda amount: shown.advance(task, amount)


class Stopwatch:
    """Seconds since it was made, for reports."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._started


def _show_by_default() -> None:
    """Give the logger a plain handler on stderr, unless the application has set up logging."""
    if LOGGER.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    # Looked at per record, since an application may set up its logging after the first report.
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    LOGGER.addHandler(handler)
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
