"""What a person sees of a run: a progress bar on a terminal, a line a step elsewhere."""

import math
import sys
import time
from types import TracebackType
from typing import Any, Self

from plait.train.plots import Line


class Meter:
    """The numbers of the steps since the last line of the log."""

    def __init__(self) -> None:
        self._labels_of_step: Any = 0
        self._began, self._seconds = time.perf_counter(), 0.0
        self._loss = self._labels = 0.0
        self._tokens = 0
        self._last: Line = {}

    def batch(self, labels: Any, tokens: int) -> None:
        """Counts one batch of all data ranks.

        Args:
            labels: Tokens that its loss is the mean of; a number or a tensor.
            tokens: Tokens that were computed.
        """
        self._labels_of_step = self._labels_of_step + labels
        self._tokens += tokens

    def step(self, loss: Any, rate: float, norm: Any) -> None:
        """The batches since the last call were one optimizer step.

        Args:
            loss: The mean over all their labels; a number or a tensor.
            rate: The learning rate of the step.
            norm: The norm of its gradients, before they were clipped.
        """
        labels = float(self._labels_of_step)
        self._loss += float(loss) * labels
        self._labels += labels
        self._labels_of_step = 0
        self._last = {"lr": rate, "grad_norm": float(norm)}
        self._seconds = time.perf_counter() - self._began

    def restart_clock(self) -> None:
        """What has been done since the last step was none of the training's."""
        self._began = time.perf_counter() - self._seconds

    def take(self) -> Line:
        """The mean loss over labels, the speed, and the last step's rate and norm; starts anew."""
        found = {
            "loss": self._loss / max(1.0, self._labels),
            **self._last,
            "labels": int(self._labels),
            "tokens": self._tokens,
            "tokens_per_s": round(self._tokens / max(self._seconds, 1e-9), 1),
        }
        self._loss = self._labels = self._seconds = 0.0
        self._tokens, self._began = 0, time.perf_counter()
        return found


class Report:
    """Shows the steps of a run, on the first rank only.

    Args:
        total: Steps of the whole run.
        done: Steps that a resumed run has behind it.
        shown: Whether this rank shows anything.
    """

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self.total, self.shown = total, shown
        self._first, self._began = done, time.perf_counter()
        self._bar: Any = None
        self._task: Any = None
        if shown and sys.stderr.isatty():
            self._bar, self._task = _bar(total, done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, line: Line | None) -> None:
        """A step is done.

        Args:
            step: How many are.
            line: What the log says about it, if anything.
        """
        words = "" if line is None else _words(line)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **({"numbers": words} if words else {}))
        elif words:
            self.say(f"step {step}/{self.total}  {words}  {self._left(step)} left")

    def say(self, text: str) -> None:
        """Shows a line, above the bar where there is one."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)  # noqa: T201 (a command's own report)

    def _left(self, step: int) -> str:
        each = (time.perf_counter() - self._began) / max(1, step - self._first)
        return clock(each * (self.total - step))


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def perplexity(loss: float) -> float:
    """Exp of a loss, without an error where it is too large."""
    return math.exp(loss) if loss < 700 else math.inf


def evaluation_words(line: Line) -> str:
    """An evaluation in words."""
    return f"evaluation loss {line['eval_loss']:.4f}, perplexity {line['perplexity']:.4g}"


def _words(line: Line) -> str:
    parts = [f"loss {line['loss']:.4f}", f"lr {line['lr']:.2e}"]
    if line.get("grad_norm") is not None:
        parts.append(f"norm {line['grad_norm']:.3g}")
    parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"{line['memory_gb']:.2f} GB")
    return "  ".join(parts)


def _bar(total: int, done: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    return bar, bar.add_task("", total=total, completed=done, numbers="")
