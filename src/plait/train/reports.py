"""The part of `Accelerator` that reports: metrics of all data ranks, and trackers."""

from collections.abc import Mapping
from typing import Any

import torch

from plait.errors import PlaitError
from plait.train import batches as contents
from plait.train import trackers
from plait.train.gradients import Gradients
from plait.train.settings import ProjectConfiguration


class Reports(Gradients):
    """Gathering for metrics, and logging.

    Attributes:
        project: Where things are written.
        trackers: Those that are open; none but on the main process.
    """

    project: ProjectConfiguration

    def _begin_reports(self, log_with: Any) -> None:
        self._wanted_trackers = trackers.checked(log_with, self.logging_dir)
        self.trackers: list[Any] = []

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, each sample once: nothing of ranks that had no samples in the last step.

        Comm: one all-gather for each tensor, or one control message for other objects.
        """
        current = self._running.current
        nothing = current is not None and current.is_placeholder
        if use_gather_object or not isinstance(input_data, torch.Tensor | Mapping | tuple | list):
            return self.gather_object([] if nothing else input_data)
        if nothing:
            input_data = contents.map_tensors(
                lambda x: (x.reshape(1) if x.ndim == 0 else x)[:0], input_data
            )
        return self.gather(input_data)

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project.logging_dir or self.project.project_dir

    @property
    def project_dir(self) -> str | None:
        """Where checkpoints go."""
        return self.project.project_dir

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers of `log_with`, on the main process."""
        if self.is_main_process:
            self.trackers = trackers.start(
                self._wanted_trackers, project_name, self.logging_dir, config, init_kwargs
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; with `unwrap` what it writes to.

        Raises:
            PlaitError: There is none, on the main process. Elsewhere a tracker that does nothing.
        """
        for tracker in self.trackers:
            if getattr(tracker, "name", None) == name:
                return tracker.tracker if unwrap else tracker
        if not self.is_main_process:
            return trackers.Tracker()
        raise PlaitError(
            f"get_tracker({name!r}):",
            f"open are {', '.join(str(t.name) for t in self.trackers) or 'none'}",
            "Accelerator(log_with=…), then init_trackers(…)",
        )

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand numbers to the trackers, on the main process; any process may call it.

        The loss that a prepared model computes from labels is the mean over the tokens of all data
        ranks already. Other numbers: `reduce` or `gather_for_metrics` first.

        Comm: none.
        """
        for tracker in self.trackers:
            further = (log_kwargs or {}).get(getattr(tracker, "name", ""), {})
            tracker.log(trackers.plain(values), step=step, **further)

    def end_training(self) -> None:
        """Close the trackers, and wait for checkpoints that are being written."""
        self.finish_saving()
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
