"""Batches of whole sequences, and each rank's part of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait.attention import Tokens, places_of
from plait.errors import LayoutError, PlaitError
from plait.mesh import SequenceAxes
from plait.state import state_of
from plait.train.batches import IGNORED

_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "labels", "position_ids")
"""Keys that tell how long the sequences of a batch are, the first that is there."""

_PER_SEQUENCE = frozenset({"pixel_values", "image_grid_thw", "video_grid_thw", "input_features"})
"""Keys whose sizes mean something else even where one of them is the number of tokens."""


class SplitBatch(dict[str, Any]):
    """A batch of which each rank of a sequence holds some tokens; a dict in all else.

    Attributes:
        tokens: Which tokens of the whole sequences are here.
    """

    tokens: Tokens


@dataclass(frozen=True)
class SplitRules:
    """How batches are split along the sequence.

    Attributes:
        length: What every sequence is padded to; None: as long as it is.
        multiple: Lengths are padded to a multiple of this.
        shift: Whether labels are tokens of which each predicts the next, as for causal language
            models; False: each label is that of its own token.
        dims: Key → the dim along which its tensor is split; None: it stays whole. Keys that are not
            named are split where a dim is as long as the sequences.
        pad_token_id: What `input_ids` are padded with.
        fill: Key → what its tensor is padded with; 0 for keys that are not named, and -100 for
            labels.
    """

    length: int | None = None
    multiple: int = 1
    shift: bool = True
    dims: Mapping[str, int | None] = field(default_factory=dict)
    pad_token_id: int = 0
    fill: Mapping[str, float] = field(default_factory=dict)


def axes_of(where: Any) -> SequenceAxes:
    """The ranks that share sequences.

    Args:
        where: A model that was split, an `Accelerator`, its `Places`, or the axes themselves.

    Raises:
        LayoutError: It is none of these, or its layout has cp_size 1 and sp_size 1.
    """
    if isinstance(where, SequenceAxes):
        return where
    found = getattr(where, "places", where)
    if isinstance(where, nn.Module):
        found = state_of(where)
    axes = getattr(found, "sequences", None)
    if isinstance(axes, SequenceAxes):
        return axes
    known = found is not None and hasattr(found, "sequences")
    raise LayoutError(
        f"The ranks that share sequences, of a {type(where).__name__}:",
        "its layout has cp_size 1 and sp_size 1: no sequence is split"
        if known
        else "it says nothing of them",
        "an Accelerator or a model with cp_size or sp_size above 1",
    )


def rules_of(where: Any) -> SplitRules:
    """How a layout says that batches are split.

    Args:
        where: As for `axes_of`.

    Returns:
        The defaults; with a `sp_seq_length` that is not variable, padded to that.
    """
    found = getattr(where, "places", where)
    found = state_of(where) if isinstance(where, nn.Module) else found
    handler = getattr(getattr(found, "config", None), "sp_handler", None)
    if handler is None or handler.sp_seq_length_is_variable:
        return SplitRules()
    return SplitRules(length=handler.sp_seq_length)


def split_batch(batch: Any, where: Any, rules: SplitRules | None = None) -> SplitBatch:
    """This rank's tokens of a batch that all ranks of the sequence hold.

    Positions are kept, or made by counting. Labels are shifted before anything is cut, so that the
    token at a border is predicted like any other, and not across the border of two documents
    (where positions begin anew). Padding continues the positions.

    Args:
        batch: A mapping with `input_ids` or `inputs_embeds` `[batch, seq(, hidden)]`, and what
            belongs to them. One that is split already is returned as it is.
        where: The ranks that share the sequences: a model, an `Accelerator`, or as `axes_of`.
        rules: How; None: as the layout says, by `rules_of`.

    Returns:
        The part, with `position_ids` `[batch, seq_local]` and, if there are labels, `shift_labels`
        in their place.

    Raises:
        LayoutError: Nobody shares sequences there.
        PlaitError: It is no mapping, it holds no tokens, its sequences are longer than
            `rules.length`, or a key has no dim of their length.

    Comm: none.
    """
    if isinstance(batch, SplitBatch):
        return batch
    axes, rules = axes_of(where), rules or rules_of(where)
    whole, length = with_targets(batch, rules)
    tokens = places_of(length, axes.cp_size, axes.sp_size)[axes.place]
    index = tokens.index()
    found = SplitBatch()
    found.tokens = tokens
    for key, value in whole.items():
        dim = _dim_of(key, value, length, rules)
        found[key] = value if dim is None else value.index_select(dim, index.to(value.device))
    return found


def with_targets(batch: Any, rules: SplitRules) -> tuple[dict[str, Any], int]:
    """A whole batch, padded, with its positions and shifted labels; and its length.

    Raises:
        PlaitError: As `split_batch`.
    """
    length = _length(batch)
    found = dict(batch)
    tokens = next(found[key] for key in _TOKENS if key in found)
    positions = found.get("position_ids")
    is_given = positions is not None
    if positions is None:
        positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
    found["position_ids"] = positions
    labels = found.get("labels")
    if rules.shift and isinstance(labels, torch.Tensor) and found.get("shift_labels") is None:
        found["shift_labels"] = shifted(found["labels"], positions if is_given else None)
    if "shift_labels" in found:
        found.pop("labels", None)
    wanted = _padded(length, rules)
    if wanted > length:
        found = {key: _pad(key, x, length, wanted, rules) for key, x in found.items()}
    return found, wanted


def shifted(labels: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """What each token is to predict: the label of the next one.

    Args:
        labels: `[batch, seq]`.
        position_ids: `[batch or 1, seq]`, or `[…, batch, seq]` with several kinds of positions;
            where they do not go on by one, another document begins, which no token of the one
            before predicts. None: each sequence is one document.

    Returns:
        `[batch, seq]`; -100 where there is nothing to predict.
    """
    moved = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if position_ids is None:
        return moved
    flat = position_ids if position_ids.ndim == 2 else position_ids.flatten(0, -3)[0]
    begins = flat[:, 1:] != flat[:, :-1] + 1
    begins = torch.nn.functional.pad(begins, (0, 1)).expand(labels.shape[0], -1)
    return moved.masked_fill(begins, IGNORED)


def _length(batch: Any) -> int:
    if not isinstance(batch, Mapping):
        raise PlaitError(
            f"A batch to be split along the sequence, a {type(batch).__name__}:",
            "only mappings say which of their tensors hold tokens",
            "let the data set or the collate function give dicts with input_ids and labels",
        )
    key = next((key for key in _TOKENS if isinstance(batch.get(key), torch.Tensor)), None)
    if key is None:
        raise PlaitError(
            f"A batch with the keys {', '.join(map(str, batch)) or '(none)'}:",
            f"none of them is one of {', '.join(_TOKENS)}, so its length is not known",
            "name the tokens input_ids or inputs_embeds",
        )
    value = batch[key]
    return int(value.shape[1] if key == "inputs_embeds" else value.shape[-1])


def _padded(length: int, rules: SplitRules) -> int:
    if rules.length is not None and length > rules.length:
        raise PlaitError(
            f"A batch of sequences of {length} tokens:",
            f"sp_seq_length is {rules.length}",
            (f"sp_seq_length={length}", "sp_seq_length_is_variable=True", "truncate the data"),
        )
    wanted = length if rules.length is None else rules.length
    return -(-wanted // rules.multiple) * rules.multiple


def _dim_of(key: str, value: Any, length: int, rules: SplitRules) -> int | None:
    """The dim along which a value is split, or None."""
    if not isinstance(value, torch.Tensor):
        return None
    if key in rules.dims:
        dim = rules.dims[key]
        if dim is not None and (not -value.ndim <= dim < value.ndim or value.shape[dim] != length):
            raise PlaitError(
                f"{key!r} of shape {tuple(value.shape)} split along dim {dim}:",
                f"that dim is not {length} long, as the sequences are",
                f"dims={{{key!r}: None}} leaves it whole",
            )
        return dim
    if key in _PER_SEQUENCE:
        return None
    if value.ndim > 1 and value.shape[1] == length:  # [batch, seq, …]
        return 1
    if value.ndim > 1 and value.shape[-1] == length:  # [3, batch, seq]
        return value.ndim - 1
    return None


def _pad(key: str, value: Any, length: int, wanted: int, rules: SplitRules) -> Any:
    dim = _dim_of(key, value, length, rules)
    if dim is None:
        return value
    last = value.narrow(dim, length - 1, 1)
    if key == "position_ids":
        steps = torch.arange(1, wanted - length + 1, device=value.device, dtype=value.dtype)
        return torch.cat([value, last + steps], dim)
    default = {"labels": IGNORED, "shift_labels": IGNORED, "input_ids": rules.pad_token_id}
    fill = rules.fill.get(key, default.get(key, 0))
    shape = list(value.shape)
    shape[dim] = wanted - length
    return torch.cat([value, value.new_full(shape, fill)], dim)
