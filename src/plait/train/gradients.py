"""The part of `Accelerator` between a loss and an optimizer step."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait import comm
from plait.errors import PlaitError
from plait.run import torch_private
from plait.state import state_of
from plait.train import accumulation, precision, preparing
from plait.train.loader import Running
from plait.train.saving import States


class Gradients(States):
    """Backward, accumulation, clipping, and when optimizers and schedulers step."""

    step_scheduler_with_optimizer: bool
    sync_with_dataloader: bool

    def _install(self, model: nn.Module) -> None:
        """Let forwards be as the settings say; the losses of accumulated batches are counted."""
        counting = self.gradient_accumulation_steps > 1 and state_of(model) is None
        precision.install(model, self.device.type, self._dtype, counting)

    def _begin_gradients(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.scaler = precision.scaler_for(self.device.type, dtype)
        self._running = Running()
        self._in_scaler = self._stepped = False
        self._skipped: set[int] = set()
        self._unscaled: set[int] = set()
        self._scaled_steps: set[int] = set()
        self._known: set[int] = set()

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step ends with an optimizer step."""
        return self.window.is_last

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps for each optimizer step."""
        return self.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        accumulation.check_steps(steps)
        self.window.steps = steps
        for model in self.models:
            self._install(model)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-step. The end of the loader ends the window, complete or not.

        Args:
            *models: Those whose gradients are accumulated; by default all that were prepared.
        """
        current = self._running.current
        end = self.sync_with_dataloader and current is not None and current.is_last
        with self.window.micro_step(*(models or self.models), end=end):
            yield

    @contextlib.contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """In this block, backward passes reduce nothing over the data ranks."""
        with accumulation.no_sync(*(models or self.models)):
            yield

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """The backward pass, weighed so that the window's gradient is that of all its tokens.

        A loss that a prepared model computed from labels knows its number of tokens. Any other is
        taken for a mean over the samples of this rank's batch.

        Comm: that of the model's backward.
        """
        current = self._running.current
        self._update_scale()
        try:
            self.window.backward(
                loss,
                turn=None if current is None else current.turn,
                data_rank=self.places.data_rank,
                scaler=self.scaler,
                **arguments,
            )
        except Exception as error:
            comm.announce_failure(None, error)
            raise

    def window_loss(self) -> torch.Tensor | None:
        """The loss of the current window over all its tokens, on all ranks alike.

        Comm: one all-reduce of a number, if the losses were not means over all ranks already.
        """
        return self.window.mean_loss(self.places.token_mesh)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scale gradients so that their norm, over all ranks, is at most `max_norm`.

        Args:
            parameters: Whose gradients.
            max_norm: The limit.
            norm_type: Of the norm; `inf` too.

        Returns:
            The norm before, as one process would have it; an ordinary tensor. While gradients are
            accumulated nothing is done, and it is NaN.

        Comm: all-reduces of one number for each kind of placement.
        """
        if not self.sync_gradients:
            return torch.tensor(float("nan"), device=self.device)
        parameters = self._unscaled_parameters(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Limit every element of the gradients; nothing while they are accumulated."""
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(self._unscaled_parameters(parameters), clip_value)

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Take the scale of a float16 loss out of the gradients, once for each step.

        Args:
            optimizer: Of whose parameters; None: of all optimizers that have gradients.
        """
        if self.scaler is None:
            return
        for each in self.optimizers if optimizer is None else [optimizer]:
            if id(each) not in self._unscaled and any(p.grad is not None for p in _held(each)):
                self._unscaled.add(id(each))
                self.scaler.unscale_(each)

    def _unscaled_parameters(
        self, parameters: torch.Tensor | Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Parameters in a list; the optimizers that hold them have true gradients now."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.scaler is not None:
            keys = set(map(id, given))
            for optimizer in self.optimizers:
                if any(id(param) in keys for param in _held(optimizer)):
                    self.unscale_gradients(optimizer)
        return given

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left its last step out: a float16 gradient was not finite."""
        return bool(self._skipped)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """A context that computes as prepared models do, for what is outside of them."""
        return precision.autocast(self.device.type, self._dtype)

    def _step(self, optimizer: Optimizer, own_step: Any, arguments: dict[str, Any]) -> Any:
        if self._in_scaler:
            self._stepped = True
            return own_step(**arguments)
        if not self.sync_gradients:
            return None
        self._refuse_strangers(optimizer)
        if self.scaler is None:
            return own_step(**arguments)
        if arguments.get("closure") is not None:
            raise PlaitError(
                f"{type(optimizer).__name__}.step(closure) with mixed_precision='fp16':",
                "the closure computes gradients anew, and they would not be scaled",
                ["mixed_precision='bf16', which needs no scale", "step() without a closure"],
            )
        self._in_scaler, self._stepped = True, False
        try:
            result = self.scaler.step(optimizer, **arguments)
        finally:
            self._in_scaler = False
        self._skipped.discard(id(optimizer))
        if not self._stepped or self._found_infinite(optimizer):
            self._skipped.add(id(optimizer))
        self._scaled_steps.add(id(optimizer))
        if all(id(other) in self._scaled_steps for other in self.optimizers):
            self._update_scale()
        return result

    def _found_infinite(self, optimizer: Optimizer) -> bool:
        """Whether the scaler met a gradient that is not finite: fused optimizers then do nothing.

        They are told by the scaler and leave the step out by themselves.
        """
        found = torch_private.found_infinite(self.scaler, optimizer)
        return any(bool(x) for x in found)

    def _update_scale(self) -> None:
        """Once all optimizers have stepped, or those that do not step were passed over."""
        if self._scaled_steps:
            self.scaler.update()
            self._scaled_steps.clear()
            self._unscaled.clear()

    def _zero_grad(self, optimizer: Optimizer, own_zero_grad: Any, set_to_none: bool) -> None:
        if self.window.may_clear:
            own_zero_grad(set_to_none)

    def _scheduler_steps(self) -> bool:
        if not self.step_scheduler_with_optimizer:
            return True
        return self.sync_gradients and not self.optimizer_step_was_skipped

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        if self.places.mesh is None or id(optimizer) in self._known:
            return
        count = preparing.strangers(optimizer, self.models)
        if count:
            raise PlaitError(
                f"A step of {type(optimizer).__name__} on {self.places.layout}:",
                f"{count} of its parameters belong to no prepared model, so that the ranks' "
                "gradients would not be brought together",
                ["prepare(…) every model that the optimizer trains"],
            )
        self._known.add(id(optimizer))


def _held(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """An optimizer's parameters."""
    return (param for group in optimizer.param_groups for param in group["params"])
