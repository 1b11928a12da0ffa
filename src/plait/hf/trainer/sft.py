"""TRL's `SFTTrainer` with a split model: its scores of tokens come from the model's own logits.

TRL multiplies hidden states by the head's whole weight, past the layer that is split. Here its
question, `model(…, labels=…, fused_lm_head=True)`, is answered by an ordinary forward whose logits
stay split, so the head may be of any kind that the model has. The loss that TRL makes of the answer
is a sum over this rank's tokens divided by the number of all, times the data ranks that FSDP takes
the mean over.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait import comm
from plait.errors import PlaitError
from plait.loss import split_logits
from plait.loss.scores import scores
from plait.state import ParallelState, own_class, state_of

MODULE = "trl.trainer.sft_trainer"
_HEAD = "add_fused_lm_head"
_VALID = "_plait_valid"  # on a model: of how many tokens the last answer is, on this rank


def install(module: Any) -> None:
    """Let TRL's module, which has just been imported, leave the heads of split models alone."""
    from wrapt import wrap_function_wrapper

    if hasattr(module, _HEAD):
        wrap_function_wrapper(module, _HEAD, _add_head)


def is_sft(kind: type) -> bool:
    """Whether a Trainer is TRL's for supervised fine-tuning."""
    return any(base.__module__ == MODULE and base.__name__ == "SFTTrainer" for base in kind.__mro__)


def check_trl(kind: type) -> None:
    """Refuse TRL's Trainers that take the head's weight themselves.

    Raises:
        PlaitError: The Trainer is one of TRL's other ones, or of an older version.
    """
    if not any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__):
        return
    if not is_sft(kind):
        raise PlaitError(
            f"{kind.__name__} with a split model:",
            "it computes losses from the head's whole weight, past the split layer",
            "SFTTrainer or transformers.Trainer",
        )
    if not hasattr(sys.modules[MODULE], _HEAD):
        raise PlaitError(
            f"{kind.__name__} with a split model:", "this version of TRL is too old", "trl>=1.16"
        )


def problems(args: Any) -> Iterator[str]:
    """What an `SFTConfig` asks for that a split model does not do."""
    if getattr(args, "activation_offloading", False):
        yield "activation_offloading=True: it takes what split layers keep for their backward"


def check_prediction(trainer: Any, state: ParallelState) -> None:
    """Refuse predictions of samples that lie in one row.

    Raises:
        PlaitError: They do, and data ranks have other rows, whose lengths nobody knows.
    """
    if getattr(trainer, "padding_free", False) and state.data_mesh is not None:
        raise PlaitError(
            "compute_metrics of packed samples on several data ranks:",
            "the samples of a batch lie in one row, of another length on each rank",
            ["eval_packing=False and padding_free=False", "prediction_loss_only=True"],
        )


def weighed(loss: Tensor, model: nn.Module, state: ParallelState, *, mean: bool) -> Tensor:
    """A mean over this rank's tokens as its term of the mean over those of all data ranks.

    Args:
        loss: Of the model's last answer.
        model: The split model.
        state: How it was split.
        mean: Whether to give the mean itself, on every rank, without a gradient.

    Comm: one all-reduce of a number, or two.
    """
    mesh = state.data_mesh
    valid = model.__dict__.get(_VALID)
    if mesh is None or valid is None:
        return loss
    count = valid.to(torch.float64)
    share = count * mesh.size() / comm.all_reduce(count.clone(), mesh).clamp(min=1)
    loss = (loss * share.to(loss.dtype)).masked_fill(valid == 0, 0)
    return comm.all_reduce(loss.detach().clone(), mesh) / mesh.size() if mean else loss


def _add_head(call: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(call).bind(*args, **kwargs)
    model = given.arguments["model"]
    if state_of(model) is None:
        return call(*args, **kwargs)
    own = model.forward
    if getattr(own, _HEAD, False):  # of an earlier Trainer
        return None

    @functools.wraps(own_class(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return _answer(self, own, args, kwargs) if fused_lm_head else own(*args, **kwargs)

    setattr(forward, _HEAD, True)
    model.forward = types.MethodType(forward, model)
    return None


def _answer(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """TRL's output, of the logits of an ordinary forward.

    Comm: that of the forward and of `scores`.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    items = kwargs.pop("num_items_in_batch", None)
    with split_logits(model):
        output = forward(*args, **{**kwargs, "use_cache": False})
    logits = output.logits
    if shifted is None:
        logits, shifted = logits[:, :-1], labels[:, 1:]
    found = scores(logits, shifted)
    count = found.valid.sum()
    model.__dict__[_VALID] = count.detach()
    return FusedCausalLMOutput(
        loss=-found.log_probs.sum() / (count.clamp(min=1) if items is None else items),
        log_probs=found.log_probs,
        entropy=found.entropy,
        is_top1=found.is_largest,
        label_mask=found.valid,
        aux_loss=getattr(output, "aux_loss", None),
    )
