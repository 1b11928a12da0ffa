"""The Trainer of a split model: whose samples, which loss, what is saved."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.hf.trainer import sft
from plait.hf.trainer.accelerating import data_place, take_over
from plait.hf.trainer.checks import check
from plait.hf.trainer.dealing import Unlabelled, own_rows, without_labels
from plait.hf.trainer.states import own_states, whole_states
from plait.loss import SplitLogits
from plait.state import ParallelState, own_class

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"  # transformers' names


class SplitTrainer:
    """In front of the class of one Trainer whose model is split; see `intercept`."""

    _plait_model: nn.Module
    _plait_state: ParallelState
    _plait_is_made = False  # __init__ has ended
    _plait_is_global = False  # the loss being computed is a mean over the data ranks already
    args: Any
    model: Any
    accelerator: Any

    def _plait_begin(self, model: nn.Module, state: ParallelState) -> None:
        self._plait_model, self._plait_state, self._plait_is_made = model, state, False

    # -- what the Trainer asks about its model -----------------------------------------------------

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """It has its gradients' sums and a save on all ranks, but can be resumed."""
        return self._plait_is_made

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, _: Any) -> None:
        pass

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """It has its place."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with an accelerator that knows the data ranks."""
        check(self.args, self._plait_state, is_sft=sft.is_sft(type(self)))
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        take_over(self.accelerator, self._plait_state)
        # The Trainer has noted the method of the class that it was.
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> Any:
        """Without a layout: accelerate would make a mesh of its own, and refuse some on the CPU."""
        given, self.args.parallelism_config = self.args.parallelism_config, None
        model = self.model
        self.model = None  # it has a tp_size
        try:
            return super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        finally:
            self.model = model
            self.args.parallelism_config = given

    def get_tp_size(self) -> int:
        """Ranks that see the same samples."""
        if self._plait_is_global:
            return int(self.accelerator.num_processes)
        return self._plait_state.tp_size

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Those that are whole on every rank are kept alike by plait."""

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        parts = [part for part in self._plait_model.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)

    # -- samples and losses ------------------------------------------------------------------------

    def _plait_masked(self, batch: Any) -> Any:
        """A batch without labels, where the last step has no sample for this rank."""
        loader = self.accelerator.gradient_state.active_dataloader
        return without_labels(batch) if own_rows(loader) == 0 else batch

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what is no sample of this rank's does not count."""
        masked = map(self._plait_masked, epoch_iterator)
        return super().get_batch_samples(masked, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a loss that the model computes is that of all data ranks already."""
        own, is_sft = self.__dict__, sft.is_sft(type(self))
        is_models = own.get("label_smoother") is None and own.get("compute_loss_func") is None
        is_models = is_models and not is_sft
        self._plait_is_global = is_models and ("labels" in inputs or "shift_labels" in inputs)
        # Whether labels are shifted goes by the name of the class, before which FSDP puts its own.
        named = self._plait_model.__dict__
        named["_get_name"] = lambda: own_class(self._plait_model).__name__
        self.accelerator._plait_is_idle = is_sft and isinstance(inputs, Unlabelled)
        try:
            found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._plait_is_global = self.accelerator._plait_is_idle = False
            del named["_get_name"]
        items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        if not is_sft or items is not None or own.get("compute_loss_func") is not None:
            return found
        loss, *rest = found if isinstance(found, tuple) else (found,)
        mean = not self.model.training
        loss = sft.weighed(loss, self._plait_model, self._plait_state, mean=mean)
        return (loss, *rest) if rest else loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; logits are whole."""
        only_loss = args[0] if args else kwargs["prediction_loss_only"]
        if not only_loss:
            sft.check_prediction(self, self._plait_state)
        found = super().prediction_step(model, self._plait_masked(inputs), *args, **kwargs)  # type: ignore[misc]
        return tuple(_whole(each) for each in found)

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """Samples of all data ranks in one step of the optimizer."""
        steps = int(self.args.gradient_accumulation_steps)
        return int(self._train_batch_size) * steps * data_place(self._plait_state)[1]  # type: ignore[attr-defined]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        return grad_norm

    # -- checkpoints -------------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()  # the first rank has written it all

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The files that one process writes.

        Comm: that of `whole_states`.
        """
        keep = bool(self.args.should_save)
        whole = whole_states(self._plait_optimizer, self._plait_model, self._plait_state, keep=keep)
        if keep:
            torch.save(whole, os.path.join(output_dir, _OPTIMIZER))
            scheduler = self.lr_scheduler  # type: ignore[attr-defined]
            torch.save(scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """From the files that one process, or any number, has written."""
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, _OPTIMIZER)):
            return
        path = os.path.join(checkpoint, _OPTIMIZER)
        whole = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        optimizer = self._plait_optimizer
        optimizer.load_state_dict(
            own_states(whole, optimizer, self._plait_model, self._plait_state)
        )
        path = os.path.join(checkpoint, _SCHEDULER)
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))  # type: ignore[attr-defined]

    @property
    def _plait_optimizer(self) -> Any:
        """Torch's own, which accelerate has wrapped."""
        optimizer = self.optimizer  # type: ignore[attr-defined]
        return getattr(optimizer, "optimizer", optimizer)


def _whole(x: Any) -> Any:
    if isinstance(x, SplitLogits):
        return x.whole()
    if isinstance(x, list | tuple):
        return type(x)(_whole(each) for each in x)
    return x
