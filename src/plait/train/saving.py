"""The state of a training as one: model, optimizer, scheduler, positions, registered objects."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait.errors import CheckpointError, PlaitError
from plait.state import full_state_dict
from plait.train.accumulation import Window
from plait.train.processes import Processes

_FOLDER = "checkpoints"


class States(Processes):
    """The part of `Accelerator` that saves and loads.

    Attributes:
        models: What was prepared.
        optimizers: Likewise.
        schedulers: Likewise.
        loaders: Likewise.
        window: The micro-steps that are being accumulated.
    """

    window: Window

    def _begin_states(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []
        self.scaler: Any = None
        self._registered: list[Any] = []
        self._before_save: list[Callable[..., None]] = []
        self._before_load: list[Callable[..., None]] = []
        self._saving: Any = None

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too.

        Args:
            *objects: With `state_dict` and `load_state_dict`.

        Raises:
            PlaitError: One has none.
        """
        lacking = [
            f"a {type(obj).__name__} has no {name}"
            for obj in objects
            for name in ("state_dict", "load_state_dict")
            if not callable(getattr(obj, name, None))
        ]
        if lacking:
            raise PlaitError("register_for_checkpointing(…):", lacking)
        self._registered += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
        """Call `hook(models, [], directory)` before each save."""
        self._before_save.append(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> None:
        """Call `hook(models, directory)` before each load."""
        self._before_load.append(hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        tokenizer: Any = None,
    ) -> Any:
        """Save everything that was prepared or registered, with `plait.checkpoint.save`.

        Args:
            output_dir: Where the checkpoints of the run are; `checkpoints` in the `project_dir`.
            step: The step of the training; by default one more than that of the latest.
            extra: Further values; `load_state` returns them.
            asynchronous: Go on while a thread writes; the next save and `end_training` wait for it.
            tokenizer: To be kept beside the model.

        Returns:
            The checkpoint's path, or with `asynchronous` a `Saving` that waits for it.

        Raises:
            PlaitError: Several models were prepared: save each with `plait.checkpoint.save`.
            CheckpointError: It is called in the middle of a window.
            CheckpointError: It cannot be written; those before it are as they were.

        Comm: control messages; no tensor travels.
        """
        from plait import checkpoint

        directory = self._directory(output_dir, "save_state")
        if not self.window.is_last:
            raise CheckpointError(
                f"save_state({os.fspath(directory)!r}):",
                "gradients are being accumulated, and a checkpoint does not hold them",
                "if accelerator.sync_gradients: accelerator.save_state(…), after the step",
            )
        model, optimizer, scheduler = self._only_ones("save_state")
        for hook in self._before_save:
            hook(self.models, [], str(directory))
        limit = getattr(getattr(self, "project", None), "total_limit", None)
        self._saving = checkpoint.save(
            directory,
            model,
            optimizer,
            scheduler,
            step=step,
            data=_Further(self),
            extra=extra,
            tokenizer=tokenizer,
            keep=limit,
            asynchronous=asynchronous,
        )
        return self._saving

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, *, step: int | None = None
    ) -> Any:
        """Load what `save_state` saved, into whatever layout this is; loaders go on in mid-epoch.

        Args:
            input_dir: As given to `save_state`, or one checkpoint in it.
            step: Which checkpoint; the latest by default.

        Returns:
            The `plait.checkpoint.Loaded`: step, extra values, path.

        Raises:
            CheckpointError: There is none, it is damaged, or does not fit. Nothing was changed.

        Comm: control messages; no tensor travels.
        """
        from plait import checkpoint

        directory = self._directory(input_dir, "load_state")
        model, optimizer, scheduler = self._only_ones("load_state")
        for hook in self._before_load:
            hook(self.models, str(directory))
        loaded = checkpoint.load(
            directory, model, optimizer, scheduler, data=_Further(self), step=step
        )
        self.window.reset(*self.models)
        return loaded

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        saving, self._saving = self._saving, None
        if hasattr(saving, "wait"):
            saving.wait()

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Write a model's weights, whole, with its own names.

        Args:
            model: One of transformers is written by its `save_pretrained`; any other to
                `model.safetensors`.
            save_directory: Where to.
            **options: For `save_pretrained`.

        Comm: as `save_pretrained` or `plait.full_state_dict`. All ranks must call.
        """
        own = getattr(model, "save_pretrained", None)
        if callable(own):
            own(save_directory, **options)
        else:
            whole = full_state_dict(model)
            if self.is_main_process:
                from safetensors.torch import save_file

                kept: dict[int, str] = {}
                for name, x in whole.items():
                    kept.setdefault(x.data_ptr() if x.numel() else id(x), name)
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                tensors = {name: whole[name].contiguous() for name in kept.values()}
                save_file(tensors, Path(save_directory) / "model.safetensors")
        self.wait_for_everyone()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, whole, on the CPU of every rank: `plait.full_state_dict`."""
        return full_state_dict(model)

    def save(self, obj: Any, f: str | os.PathLike[str], **_: Any) -> None:
        """`torch.save` on the main process."""
        if self.is_main_process:
            torch.save(obj, f)

    def _directory(self, given: str | os.PathLike[str] | None, asked: str) -> Path:
        if given is not None:
            return Path(given)
        project = getattr(getattr(self, "project", None), "project_dir", None)
        if project is None:
            raise CheckpointError(
                f"{asked}():",
                "it was given no directory, and the Accelerator no project_dir",
                [f"{asked}('checkpoints')", "Accelerator(project_dir='runs/first')"],
            )
        return Path(project) / _FOLDER

    def _only_ones(self, asked: str) -> tuple[nn.Module, Any, Any]:
        problems = []
        if not self.models:
            problems.append("no model was prepared")
        for kind, held in (
            ("models", self.models),
            ("optimizers", self.optimizers),
            ("schedulers", self.schedulers),
        ):
            if len(held) > 1:
                problems.append(f"{len(held)} {kind} were prepared, and one can be saved")
        if problems:
            raise PlaitError(
                f"{asked}(…):", problems, "plait.checkpoint.save and load for each model by itself"
            )
        optimizer = self.optimizers[0] if self.optimizers else None
        return self.models[0], optimizer, self.schedulers[0] if self.schedulers else None


class _Further:
    """What belongs to the state besides model, optimizer and scheduler, as one object."""

    def __init__(self, states: States) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        """Positions of the loaders, the scale of float16 losses, what was registered."""
        states = self.states
        return {
            "loaders": [loader.state_dict() for loader in states.loaders],
            "scaler": None if states.scaler is None else states.scaler.state_dict(),
            "registered": [obj.state_dict() for obj in states._registered],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse.

        Raises:
            CheckpointError: Another number of loaders or objects was saved.
        """
        states = self.states
        problems = [
            f"{len(state[name])} {words} were saved, there are {len(here)}"
            for name, words, here in (
                ("loaders", "loaders", states.loaders),
                ("registered", "registered objects", states._registered),
            )
            if len(state[name]) != len(here)
        ]
        if problems:
            raise CheckpointError(
                "load_state(…):", problems, "prepare and register the same as when it was saved"
            )
        for loader, saved in zip(states.loaders, state["loaders"], strict=True):
            loader.load_state_dict(saved)
        if states.scaler is not None and state["scaler"] is not None:
            states.scaler.load_state_dict(state["scaler"])
        for obj, saved in zip(states._registered, state["registered"], strict=True):
            obj.load_state_dict(saved)
