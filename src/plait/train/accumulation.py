"""Gradients of several micro-batches that are those of one large batch.

Each loss is a mean over a number of tokens, N₁, N₂, … of the whole global micro-batch. The mean
over all tokens is Σ Nᵢ Lᵢ / Σ Nᵢ, and so is its gradient: every backward pass is weighed by its
count, and the gradients are divided by the total once, after the last. Counts are taken relative to
the first one, so that the gradients in between have the size of ordinary ones.

Until the last micro-step the ranks reduce nothing: FSDP keeps whole gradients meanwhile, as much
memory as the unsharded parameters that a rank computes with. `sync_each_batch` reduces each time
and keeps chunks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plait import comm
from plait.errors import PlaitError
from plait.loss.asking import is_made_of
from plait.loss.reduction import OTHERS, TOKENS, WEIGHT
from plait.run import torch_private
from plait.run.around import split_module
from plait.train.turns import Turn

_LAST_COUNT = "_plait_last_count"  # where plait.loss.last_count looks


@contextlib.contextmanager
def syncing(models: Sequence[nn.Module], sync: bool) -> Iterator[None]:
    """In this block, backward passes reduce gradients over the data ranks, or do not.

    Afterwards it is for each module as it was before.

    Args:
        models: Those that FSDP shards; for any other there is nothing to do.
        sync: False: gradients are kept on each rank until a pass with True.
    """
    parts = _sharded(models)
    before = [torch_private.fsdp_reduces(part) for part in parts]
    for part in parts:
        part.set_requires_gradient_sync(sync, recurse=False)
    try:
        yield
    finally:
        for part, reduces in zip(parts, before, strict=True):
            part.set_requires_gradient_sync(reduces, recurse=False)


def _sharded(models: Sequence[nn.Module]) -> list[Any]:
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


@contextlib.contextmanager
def no_sync(*models: nn.Module) -> Iterator[None]:
    """In this block, backward passes reduce nothing over the data ranks."""
    with syncing(models, False):
        yield


def check_steps(steps: Any) -> None:
    """Refuse what is no number of micro-steps.

    Raises:
        PlaitError: It is none of 1, 2, 3, ….
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise PlaitError(
            f"gradient_accumulation_steps={steps!r}:",
            "a step of the optimizer follows a whole number of micro-steps, 1 or more",
        )


class Window:
    """The micro-steps that lead to one optimizer step.

    ```python
    window = Window(steps=4)
    for number, batch in enumerate(batches, 1):
        with window.micro_step(model, end=number == len(batches)):
            window.backward(model(**batch).loss)
            if window.is_last:
                optimizer.step()
                optimizer.zero_grad()
    ```

    Attributes:
        steps: Micro-steps for each optimizer step.
        sync_each_batch: Reduce gradients in every micro-step.
        is_last: Whether this micro-step, or the one before the next, ends the window.
    """

    def __init__(self, steps: int = 1, *, sync_each_batch: bool = False) -> None:
        check_steps(steps)
        self.steps, self.sync_each_batch = steps, sync_each_batch
        self.is_last = True
        self._step = 0  # micro-steps since the last window ended at a multiple of `steps`
        self._models: Sequence[nn.Module] = ()
        self._counts: dict[int, Any] = {}  # what the models had counted before this micro-step
        self._open = False  # inside of micro_step
        self._weight: float | None = None  # of this micro-step, from its first backward
        self._reference: float | None = None
        self._total = 0.0
        self._divided = False
        self._sum: torch.Tensor | None = None
        self._sum_is_global = True

    @property
    def may_clear(self) -> bool:
        """Whether gradients may be cleared now: not in the middle of a window."""
        return self._total == 0.0 or self._divided

    def reset(self, *models: nn.Module) -> None:
        """Forget what was accumulated: the next micro-step begins a window.

        The gradients of a window that has not ended go, and those that FSDP keeps until they are
        reduced, which `zero_grad` does not see.

        Args:
            models: Those whose unreduced gradients go, beside those of the last micro-step.
        """
        for part in _sharded([*self._models, *models]):
            torch_private.drop_unreduced(part)
        if self._total and not self._divided:
            for model in self._models:
                model.zero_grad()
        self._total = 0.0
        self._step, self.is_last, self._open = 0, True, False

    def forget(self) -> None:
        """Let go of the models; gradients stay as they are."""
        self._models, self._counts = (), {}
        self._total, self._sum = 0.0, None
        self._step, self.is_last, self._open = 0, True, False

    @contextlib.contextmanager
    def micro_step(self, *models: nn.Module, end: bool = False) -> Iterator[None]:
        """One forward and backward pass of a window.

        An exception in it ends the window, and drops what it has accumulated. Leaving a loop with
        `break` does not: the next micro-step goes on with the window, unless `reset` is called.

        Args:
            models: Those whose gradients are accumulated.
            end: There is no further batch: the window ends here, complete or not.
        """
        self._begin(models, end)
        try:
            with syncing(models, self.is_last or self.sync_each_batch):
                yield
        except BaseException:
            self._divided = False  # what is complete goes too
            self.reset()
            raise
        finally:
            self._open = False

    def _begin(self, models: Sequence[nn.Module], end: bool) -> None:
        if self.is_last:
            self._reference, self._total, self._divided = None, 0.0, False
            self._sum, self._sum_is_global = None, True
        self._step = 0 if end else self._step + 1
        self.is_last = end or self._step % self.steps == 0
        self._weight, self._open, self._models = None, True, models
        self._look(models)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        turn: Turn | None = None,
        data_rank: int = 0,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        """The backward pass of one loss, weighed; divides the gradients after the last.

        A loss without a count is taken for a mean over this rank's samples, where `turn` says how
        many each rank has, and else weighs as much as any other. Several passes in one micro-step
        share the weight of the first.

        Args:
            loss: A number; the mean over the micro-batch.
            turn: What the data ranks have in this step.
            data_rank: Which of them this rank is.
            scaler: A `torch.amp.GradScaler` through which it goes.
            **options: For `torch.Tensor.backward`.

        Raises:
            PlaitError: Of several micro-steps one has a loss that is a sum of different means.

        Comm: that of the model's backward.
        """
        counted = loss.__dict__.get(TOKENS, self._new_count(loss))
        share = 1.0
        if counted is None and turn is not None and turn.num_samples:
            share = turn.sizes[data_rank] * len(turn.sizes) / turn.num_samples
        if self._open:
            weight = self._weigh(counted, turn)
        else:
            weight = 1 / self.steps
        factor = share * (weight / self._total if self._divided else weight)
        self._note(loss.detach(), weight * share, counted is not None)
        weighed = loss if factor == 1.0 else loss * factor
        if scaler is not None:
            weighed = scaler.scale(weighed)
        weighed.backward(**options)
        self._look(self._models)
        if self._open and self.is_last and not self._divided:
            divide_gradients(self._models, self._total)
            self._divided = True

    def mean_loss(self, data_mesh: DeviceMesh | None = None) -> torch.Tensor | None:
        """The loss of the whole window so far, over all its tokens; None before the first.

        Args:
            data_mesh: The ranks that see other samples.

        Comm: one all-reduce of a number, if the losses were not means over all ranks already.
        """
        if self._sum is None:
            return None
        mean = self._sum / self._total if self._total else self._sum
        if data_mesh is not None and not self._sum_is_global:
            mean = comm.all_reduce(mean, data_mesh) / data_mesh.size()
        return mean

    def _weigh(self, counted: Any, turn: Turn | None) -> float:
        """The weight of this micro-step; counts are read where there is more than one."""
        if self._weight is None:
            count = 1.0
            if self.steps > 1 and counted is not None:
                count = _weight_of(counted)
            elif self.steps > 1 and turn is not None and turn.num_samples:
                count = float(turn.num_samples)
            if self._reference is None and count > 0:
                self._reference = count
            self._weight = count / (self._reference or 1.0)
            self._total += self._weight
        return self._weight

    def _look(self, models: Sequence[nn.Module]) -> None:
        self._counts = {id(model): _count(model) for model in models}

    def _new_count(self, loss: torch.Tensor) -> Any:
        """What a model has counted since the last look: a loss made of its loss has no note."""
        for model in self._models:
            count = _count(model)
            is_new = count is not None and count is not self._counts.get(id(model))
            if is_new and is_made_of(loss, model):
                return count
        return None

    def _note(self, loss: torch.Tensor, weight: float, is_global: bool) -> None:
        term = loss * weight if weight else torch.zeros_like(loss)
        self._sum = term if self._sum is None else self._sum + term
        self._sum_is_global = self._sum_is_global and is_global


def _weight_of(counted: Any) -> float:
    """What a mean was divided by.

    Raises:
        PlaitError: The loss is the sum of means over different numbers of tokens.
    """
    known = getattr(counted, "__dict__", {})
    others = {float(x.__dict__.get(WEIGHT, x)) for x in known.get(OTHERS, ())}
    if len(others) > 1:
        numbers = " and ".join(f"{x:g}" for x in sorted(others))
        raise PlaitError(
            "Accumulating gradients of a model that adds up several losses:",
            f"they are means over {numbers} tokens, and one weight for their sum would be wrong",
            [
                "gradient_accumulation_steps=1, with larger batches",
                "a loss of your own: plait.loss.split_logits(model), one backward for each mean, "
                "each in a Window of its own",
            ],
        )
    return float(known.get(WEIGHT, counted))


def _count(model: nn.Module) -> Any:
    """The very object that the model's last call with labels left."""
    return split_module(model).__dict__.get(_LAST_COUNT)


@torch.no_grad()
def divide_gradients(models: Sequence[nn.Module], total: float) -> None:
    """Divide every gradient, in place.

    Args:
        models: Whose parameters.
        total: By what; 0 and 1 leave them.

    Comm: none.
    """
    if total in (0.0, 1.0):
        return
    grads: dict[int, torch.Tensor] = {}
    for model in models:
        for param in model.parameters():
            if param.grad is not None:
                grad = param.grad
                grads[id(param)] = grad._local_tensor if isinstance(grad, DTensor) else grad
    if grads:
        torch._foreach_div_(list(grads.values()), total)
