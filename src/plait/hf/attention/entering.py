"""A model of transformers before and in a forward over sequences that ranks share."""

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from plait.attention import SharedSequences, meet
from plait.errors import PlaitError, PlanError
from plait.mesh import SequenceAxes
from plait.run.around import split_module

_ONE_RANK = "cp_size=1 and sp_size=1"
_CACHES = ("past_key_values", "cache_params")


def refuse_unshareable(model: Any) -> None:
    """Refuse a model whose attention does not go through transformers' interface.

    Raises:
        PlanError: It is no model of transformers, or has attention of its own.
    """
    can = getattr(type(model), "_can_set_attn_implementation", None)
    if can is None or not can() or not getattr(model, "_supports_attention_backend", False):
        why = (
            "its attention does not go through transformers' AttentionInterface"
            if can is not None
            else "it is no model of transformers, whose attention layers plait knows"
        )
        raise PlanError(
            f"cp_size or sp_size for {type(model).__name__}:",
            why,
            [_ONE_RANK, "tp_size, dp_shard_size"],
        )


@lru_cache(maxsize=1024)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def entered(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axes: SequenceAxes
) -> tuple[dict[str, Any], SharedSequences]:
    """Meet the ranks that share the sequences of a call, and complete its arguments.

    Args:
        model: Whose forward is called.
        args: Its arguments by place.
        kwargs: Its arguments by name: this rank's tokens.
        axes: The ranks.

    Returns:
        All arguments by name: with positions in the whole sequences, labels of the next tokens
        wherever these are, and no cache; and what the ranks have told each other.

    Raises:
        PlaitError: There are no tokens, a cache or a mask of more than two dims, or the ranks were
            given what does not fit.

    Comm: one all-gather of five integers for each token.
    """
    names = _parameters(type(model).forward)
    call = dict(zip(names[1:], args, strict=False)) | kwargs
    ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
    tokens = ids if isinstance(ids, torch.Tensor) else embeds
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    problems = _problems(model, call, tokens, mask)
    if call.get("shift_labels") is not None and call.get("labels") is None:
        problems += _shift_problems(model)
    if problems or tokens is None:
        raise PlaitError(
            f"A forward of {type(model).__name__} over sequences that ranks share:",
            problems,
            "plait.gathered(model): forwards over whole sequences, each rank by itself",
        )
    labels, targets = call.get("labels"), call.get("shift_labels")
    shifts = isinstance(labels, torch.Tensor) and targets is None and _predicts_next(model)
    flat = None
    if isinstance(positions, torch.Tensor):
        flat = positions if positions.ndim == 2 else positions.flatten(0, -3)[0]
    sequences = meet(
        axes,
        (tokens.shape[0], tokens.shape[1]),
        tokens.device,
        ids=ids,
        positions=flat,
        mask=mask,
        labels=labels if shifts else None,
    )
    if positions is None and "position_ids" in names:
        own = sequences.mine.index().to(tokens.device)
        call["position_ids"] = own.expand(tokens.shape[0], -1)
    if sequences.labels is not None:
        moved = torch.nn.functional.pad(sequences.labels[:, 1:], (0, 1), value=-100)
        targets = sequences.own(moved)
    if isinstance(targets, torch.Tensor) and "labels" in names:
        call["labels"] = call["shift_labels"] = targets
    if "use_cache" in names:
        call["use_cache"] = False
    return call, sequences


def _problems(model: nn.Module, call: dict[str, Any], tokens: Any, mask: Any) -> list[str]:
    found = []
    if not isinstance(tokens, torch.Tensor):
        found.append("it has neither input_ids nor inputs_embeds")
    if isinstance(mask, torch.Tensor) and mask.ndim != 2:
        found.append(f"attention_mask has {mask.ndim} dims, of which the ranks can share 2")
    found += [
        f"{name} is given: caches are not shared" for name in _CACHES if call.get(name) is not None
    ]
    return found


def _shift_problems(model: nn.Module) -> list[str]:
    if _predicts_next(model):
        return []
    return [
        "shift_labels are given, but the loss of this model is not of next tokens: split batches "
        "with SplitRules(shift=False), which leaves labels where they are"
    ]


def _predicts_next(model: nn.Module) -> bool:
    """Whether a model's labels are the tokens themselves, of which it predicts the next."""
    loss: Any = getattr(split_module(model), "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
