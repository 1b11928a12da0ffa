"""`plait.Accelerator`: the parts of this room under the names that accelerate's users know."""

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from plait.layout import ParallelismConfig
from plait.run import seeds
from plait.train import accumulation, loader, precision, preparing
from plait.train import settings as options
from plait.train.loader import DataRankLoader
from plait.train.places import places_for
from plait.train.reports import Reports


class Accelerator(Reports):
    """One training script for any layout.

    ```python
    accelerator = plait.Accelerator(parallelism_config=config, gradient_accumulation_steps=4)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    ```

    Args:
        parallelism_config: The sizes. None: those of the PARALLELISM_CONFIG_* environment
            variables; where all are 1, every process is a data-parallel copy.
        mixed_precision: "no", "bf16" or "fp16": what matrix products of prepared models are
            computed in.
        gradient_accumulation_steps: Micro-steps for each optimizer step.
        log_with: "jsonl", "tensorboard", "wandb", "all", a tracker, or a list of them.
        project_dir: Where checkpoints and logs go.
        seed: Set on every process, and the order of shuffled samples depends on it.
        device_placement: Whether models and batches are moved to the device.
        split_batches: A loader's batch size is that of all data ranks together.
        step_scheduler_with_optimizer: False: schedulers step whenever they are told to.
        dataloader_config: A `plait.train.DataLoaderConfiguration`.
        gradient_accumulation_plugin: A `plait.train.GradientAccumulationPlugin`.
        project_config: A `plait.train.ProjectConfiguration`.
        **others: Other arguments of accelerate's: refused by name, unless they ask for nothing.

    Raises:
        LayoutError: The sizes do not fit the processes.
        PlaitError: A tracker is not installed; settings contradict each other.

    Comm: joins the processes and makes the mesh. All ranks must call.

    Attributes:
        window: The micro-steps that are being accumulated.
        models: Those that were prepared.
        optimizers: Likewise.
        schedulers: Likewise.
        loaders: Likewise.
        trackers: Those that are open; none but on the main process.
    """

    def __init__(  # noqa: PLR0913 - the list of arguments is accelerate's
        self,
        parallelism_config: ParallelismConfig | None = None,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        device_placement: bool = True,
        split_batches: bool | None = None,
        step_scheduler_with_optimizer: bool = True,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        project_config: Any = None,
        **others: Any,
    ) -> None:
        options.refuse(others)
        self.mixed_precision = str(mixed_precision or "no").lower()
        dtype = precision.dtype_of(mixed_precision)
        self._loading = options.taken(
            options.DataLoaderConfiguration,
            dataloader_config,
            "dataloader_config",
            split_batches=split_batches,
        )
        accumulating = options.taken(
            options.GradientAccumulationPlugin,
            gradient_accumulation_plugin,
            "gradient_accumulation_plugin",
            num_steps=gradient_accumulation_steps,
        )
        self.project = options.taken(
            options.ProjectConfiguration,
            project_config,
            "project_config",
            project_dir=None if project_dir is None else os.fspath(project_dir),
        )
        self._begin_reports(log_with)
        super().__init__(places_for(parallelism_config))
        self._begin_states()
        self._begin_gradients(dtype)
        if seed is not None:
            seeds.set_all(seed)
        self._seed = self._loading.data_seed if self._loading.data_seed is not None else seed
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.sync_with_dataloader = accumulating.sync_with_dataloader
        self.window = accumulation.Window(
            accumulating.num_steps, sync_each_batch=accumulating.sync_each_batch
        )
        self._replaced = preparing.Replaced()

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, loaders and schedulers ready for the layout.

        In any order, before or after each other. Models are split in place; optimizers keep
        their identity and follow the parameters that were replaced; loaders and schedulers come
        back as new objects. What is none of these is returned as it is.

        Args:
            *objects: Any number.

        Returns:
            The same, in the same order; one alone is returned by itself.

        Raises:
            LayoutError: A model was split over another layout.
            PlaitError: An optimizer has a state for parameters that are replaced.

        Comm: that of `plait.parallelize`, and a control message for each loader.
        """
        done: dict[int, Any] = {}
        for obj in objects:
            if isinstance(obj, nn.Module):
                done[id(obj)] = self.prepare_model(obj)
        for obj in objects:
            if isinstance(obj, Optimizer):
                done[id(obj)] = self.prepare_optimizer(obj)
            elif isinstance(obj, DataLoader | DataRankLoader):
                done[id(obj)] = self.prepare_data_loader(obj)
            elif preparing.is_scheduler(obj):
                done[id(obj)] = self.prepare_scheduler(obj)
        found = tuple(done.get(id(obj), obj) for obj in objects)
        return found[0] if len(found) == 1 else found

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Split one model; see `prepare`."""
        if self.device_placement or self.places.mesh is not None:
            preparing.prepare_model(model, self.places, self._replaced)
        self._install(model)
        if not any(model is known for known in self.models):
            self.models.append(model)
        for optimizer in self.optimizers:
            self._replaced.follow(optimizer)
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let one optimizer step with the windows; see `prepare`."""
        self._replaced.follow(optimizer)
        preparing.bind_step(optimizer, self._step, self._zero_grad)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        return optimizer

    def prepare_data_loader(
        self, data: Any, device_placement: bool | None = None, *, sharded: bool | None = None
    ) -> DataRankLoader:
        """Deal out one loader's samples; see `prepare` and `plait.train.data_loader`."""
        if isinstance(data, DataRankLoader):
            return data
        place = self.device_placement if device_placement is None else device_placement
        made = loader.data_loader(
            data,
            self.places,
            seed=self._seed,
            split_batches=self._loading.split_batches,
            sharded=self._loading.sharded if sharded is None else sharded,
            device=self.device if place else None,
            non_blocking=self._loading.non_blocking,
            running=self._running,
        )
        self.loaders.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> preparing.PreparedScheduler:
        """Let one scheduler step with the optimizer, once for each of its steps.

        accelerate's steps `num_processes` times instead; schedules made for it that count
        processes need their number of steps divided by that.
        """
        if isinstance(scheduler, preparing.PreparedScheduler):
            return scheduler
        made = preparing.PreparedScheduler(scheduler, self._scheduler_steps)
        self.schedulers.append(made)
        return made

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model itself: plait wraps none."""
        return model

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> loader.SkippedLoader:
        """The loader from a later step on; its epochs go on."""
        return loader.skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything that was prepared; gives a None for each object."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            held.clear()
        self.window.forget()
        for ids in (self._known, self._skipped, self._unscaled, self._scaled_steps):
            ids.clear()
        self._replaced = preparing.Replaced()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory
