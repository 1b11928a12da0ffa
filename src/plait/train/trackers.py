"""Where logged numbers go: JSON lines, TensorBoard, wandb, or the user's own tracker."""

import dataclasses
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.errors import PlaitError


class Tracker:
    """What logged numbers are given to; subclass it for one of your own.

    An instance goes into `Accelerator(log_with=…)`. It is used on the main process only.

    Attributes:
        name: How `get_tracker` finds it.
        tracker: What it writes to, for calls that are special to it.
    """

    name = "own"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        """What it writes to."""
        return self

    def start(self) -> None:
        """Called once, by `init_trackers`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep the numbers of one step."""

    def finish(self) -> None:
        """Called once, by `end_training`."""


class JsonlTracker(Tracker):
    """One JSON object a line in `metrics.jsonl`; the settings in `config.json` beside it.

    A run that is resumed writes on in the same file.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **_: Any) -> None:
        self.directory = Path(logging_dir) / run_name
        self._file: Any = None

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.directory / "metrics.jsonl"

    def start(self) -> None:
        """Open the file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = self.tracker.open("a", encoding="utf-8")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write them to `config.json`."""
        text = json.dumps(plain(values), indent=2) + "\n"
        (self.directory / "config.json").write_text(text, encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Write a line, and see to it that it is on its way to the disk."""
        line = {"step": step, "time": round(time.time(), 3), **plain(values)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardTracker(Tracker):
    """Scalars, and texts, for TensorBoard."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **options: Any) -> None:
        self.directory = Path(logging_dir) / run_name
        self._options = options
        self._writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self._writer

    def start(self) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.directory), **self._options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep them as a text."""
        text = json.dumps(plain(values), indent=2)
        self.tracker.add_text("config", f"```\n{text}\n```")

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Add a scalar, a text or several scalars for each value, by its kind."""
        for key, value in plain(values).items():
            if isinstance(value, bool | int | float):
                self.tracker.add_scalar(key, value, global_step=step, **options)
            elif isinstance(value, str):
                self.tracker.add_text(key, value, global_step=step, **options)
            elif isinstance(value, dict):
                self.tracker.add_scalars(key, value, global_step=step, **options)
        self.tracker.flush()

    def finish(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases."""

    name = "wandb"

    def __init__(self, run_name: str, logging_dir: Any = None, **options: Any) -> None:
        self.run_name, self._options = run_name, options
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self._run

    def start(self) -> None:
        """Start the run."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=self.run_name, **self._options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Into the run's config."""
        self.tracker.config.update(plain(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log them to the run."""
        self.tracker.log(plain(values), step=step, **options)

    def finish(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


KINDS: dict[str, tuple[Callable[..., Tracker], tuple[str, ...]]] = {
    "jsonl": (JsonlTracker, ()),
    "tensorboard": (TensorBoardTracker, ("tensorboard", "tensorboardX")),
    "wandb": (WandbTracker, ("wandb",)),
}
"""Trackers by name, and the packages of which one must be installed."""


def checked(log_with: Any, directory: str | os.PathLike[str] | None) -> list[Any]:
    """Names of trackers, and trackers of the user's own, in a list without doubles.

    Args:
        log_with: A name, "all" for those that are installed, a tracker, or a list of them.
        directory: Where those that write files write; None: nowhere.

    Raises:
        PlaitError: There is no such tracker, its package is not installed, or it needs a directory.
    """
    given = log_with if isinstance(log_with, list | tuple) else [log_with]
    wanted: dict[Any, None] = {}
    problems = []
    for item in given:
        name = getattr(item, "value", item)  # an enumeration's member, too
        if name is None:
            continue
        if not isinstance(name, str):
            wanted[item] = None
            problems += _lacking(item)
        elif name.lower() == "all":
            wanted |= dict.fromkeys(kind for kind in KINDS if _is_installed(kind))
        elif name.lower() not in KINDS:
            problems.append(f"there is no tracker {name!r}; there are {', '.join(KINDS)}")
        elif not _is_installed(name.lower()):
            problems.append(f"{name!r} needs the package {KINDS[name.lower()][1][0]}")
        else:
            wanted[name.lower()] = None
    if directory is None:
        for item in wanted:
            kind = KINDS[item][0] if isinstance(item, str) else item
            if getattr(kind, "requires_logging_directory", False) and isinstance(item, str):
                problems.append(f"{item!r} writes files, and no project_dir is given")
    if problems:
        raise PlaitError(
            f"log_with={log_with!r}:",
            problems,
            [
                "log_with='jsonl' with a project_dir needs no package",
                "pip install what is missing",
            ],
        )
    return list(wanted)


def start(
    wanted: list[Any],
    run_name: str,
    directory: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Open trackers; on the main process only.

    Args:
        wanted: As `checked` gives them.
        run_name: Name of the run or project.
        directory: Where files go.
        config: Settings of the run, to be kept.
        options: Tracker name → further arguments.
    """
    opened = []
    for item in wanted:
        if isinstance(item, str):
            item = KINDS[item][0](run_name, directory, **dict((options or {}).get(item, {})))
        if hasattr(item, "start"):
            item.start()
        if config is not None:
            item.store_init_configuration(plain(config))
        opened.append(item)
    return opened


def plain(values: Any) -> Any:
    """Values as plain data: tensors of one element as numbers, dataclasses as dicts."""
    if isinstance(values, torch.Tensor):
        return values.item() if values.numel() == 1 else values.tolist()
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return plain(dataclasses.asdict(values))
    if isinstance(values, Mapping):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple | set):
        return [plain(value) for value in values]
    if values is None or isinstance(values, bool | int | float | str):
        return values
    return values.item() if hasattr(values, "item") else str(values)


def _is_installed(kind: str) -> bool:
    packages = KINDS[kind][1]
    return not packages or any(importlib.util.find_spec(name) for name in packages)


def _lacking(tracker: Any) -> list[str]:
    needed = ("log", "store_init_configuration", "finish")
    missing = [name for name in needed if not callable(getattr(tracker, name, None))]
    if not missing:
        return []
    return [f"{type(tracker).__name__} is no tracker: it has no {', '.join(missing)}"]
