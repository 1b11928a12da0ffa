"""The attention implementation "plait" in transformers' registries.

Registering a name changes no model; a model has it when its config says so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plait.attention import (
    MaskSpec,
    Settings,
    SharedSequences,
    Tokens,
    attend,
    attend_over_ranks,
    current,
    documents_of,
    segments_of,
    work_of,
)
from plait.errors import PlaitError, PlanError
from plait.hf.attention.closures import Meaning, meaning_of

NAME = "plait"
_NOT_SHARED = "without cp_size and sp_size, or with plait.gathered(model) around the call"


class Described:
    """A mask that was not built: what layers get in its place.

    Attributes:
        spec: The description, of the whole sequences.
        sequences: Who holds them; None: this rank alone.
        length: Of the whole sequences.
    """

    def __init__(self, spec: MaskSpec, sequences: SharedSequences | None, length: int) -> None:
        self.spec, self.sequences, self.length = spec, sequences, length


def register() -> None:
    """Make the implementation known; again and again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe)


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """A mask of transformers as a description.

    Args:
        batch_size: Sequences.
        q_length: Queries of this call.
        kv_length: Keys, those of a cache included.
        q_offset: Place of the first query.
        kv_offset: Place of the first key.
        mask_function: Composed by `transformers.masking_utils`.
        attention_mask: `[batch, kv_length]`, False where a token is padding.
        **kwargs: What else mask functions of transformers are given.

    Returns:
        The description; where keys come from a cache, the mask that transformers' sdpa has.

    Raises:
        PlanError: The mask function is none of transformers' own.
    """
    sequences = current()
    alone = sequences is None
    if alone and (q_length != kv_length or isinstance(q_offset, Tensor) or q_offset or kv_offset):
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    meaning = meaning_of(mask_function)
    if sequences is not None:
        _check_tokens(sequences, batch_size, q_length, kv_length)
        return Described(_shared_spec(meaning, sequences), sequences, sequences.length)
    valid = attention_mask
    if valid is not None:
        valid = None if bool(valid.all()) else valid.bool()
    spec = _spec(meaning, valid, meaning.documents, meaning.positions, (batch_size, kv_length))
    return Described(spec, None, kv_length)


def _check_tokens(sequences: SharedSequences, batch: int, q_length: int, kv_length: int) -> None:
    """Refuse attention to other tokens than those that the ranks share."""
    mine = (sequences.batch, len(sequences.mine), len(sequences.mine))
    if (batch, q_length, kv_length) != mine:
        raise PlanError(
            "Attention over sequences that ranks share:",
            f"a mask is asked for {batch} × {q_length} queries and {kv_length} keys, but the ranks "
            f"share {mine[0]} sequences of which this one holds {mine[1]} tokens: another encoder "
            "inside of the model, or a cache",
            _NOT_SHARED,
        )


def _shared_spec(meaning: Meaning, sequences: SharedSequences) -> MaskSpec:
    """The description of sequences of which each rank has seen a part only."""
    if meaning.blocks is not None:
        raise PlanError(
            "Attention over sequences that ranks share:",
            "blocks of tokens that see each other (of images) are not told between ranks",
            _NOT_SHARED,
        )
    valid, positions = sequences.valid, sequences.positions
    documents = None if valid is not None or positions is None else documents_of(positions)
    if valid is not None and bool(valid.all()):
        valid = None
    left = None if valid is None else (valid.cumsum(1) == 0).sum(1)
    here = None if documents is None else positions
    shape = (sequences.batch, sequences.length)
    told = (meaning.causal, meaning.window, meaning.chunk)
    known: MaskSpec | None = sequences.routes.get(("spec", told))
    if known is None:
        meaning = Meaning(*told, left_padding=left)
        known = _spec(meaning, valid, documents, here, shape)
        sequences.routes["spec", told] = known
    return known


def _spec(
    meaning: Meaning,
    valid: Tensor | None,
    documents: Tensor | None,
    positions: Tensor | None,
    shape: tuple[int, int],
) -> MaskSpec:
    chunks = None
    if meaning.chunk is not None:
        like = next((x for x in (positions, valid, meaning.left_padding) if x is not None), None)
        device = None if like is None else like.device
        places = torch.arange(shape[1], device=device).expand(*shape)
        places = places if positions is None else positions.expand(*shape)
        if meaning.left_padding is not None:
            places = places - meaning.left_padding[:, None]
        chunks = places.div(meaning.chunk, rounding_mode="floor")
    if documents is not None:
        documents = documents.expand(*shape)
    return MaskSpec(
        meaning.causal, meaning.window, segments_of(documents, chunks), valid, meaning.blocks
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The layer.
        query: `[batch, heads, q, qk_dim]`.
        key: `[batch, kv_heads, k, qk_dim]`.
        value: `[batch, kv_heads, k, v_dim]`.
        attention_mask: What `describe` returned; a tensor or None goes to transformers' sdpa.
        dropout: Of the weights; only on one rank.
        scaling: Factor of the scores; None: `qk_dim ** -0.5`.
        **kwargs: `softcap`, `s_aux` (sinks) and what else layers pass.

    Returns:
        `[batch, q, heads, v_dim]`, and None for the weights.

    Raises:
        PlaitError: Dropout, a bias or a mask of one's own on sequences that ranks share.

    Comm: where ranks share the sequences, that of `attend_over_ranks`.
    """
    described = attention_mask if isinstance(attention_mask, Described) else None
    sequences = current() if described is None else described.sequences
    bias = kwargs.get("position_bias")
    problems = [
        "dropout of attention weights" if dropout else "",
        "a bias of scores by position" if bias is not None else "",
        "a mask that transformers did not compose" if described is None else "",
    ]
    if sequences is not None and any(problems):
        raise PlaitError(
            f"{type(module).__name__} over sequences that ranks share:",
            [f"it has {problem}" for problem in problems if problem],
            ("config.attention_dropout = 0", _NOT_SHARED) if dropout else _NOT_SHARED,
        )
    if described is None or dropout or bias is not None:
        return _by_transformers(
            module, (query, key, value), attention_mask, dropout, scaling, kwargs
        )
    settings = Settings(
        query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap")
    )
    sinks = kwargs.get("s_aux")
    if sequences is not None:
        out = attend_over_ranks((query, key, value), described.spec, sequences, settings, sinks)
    else:
        every = Tokens(((0, described.length),))
        work = work_of(described.spec, every, every, query.shape[0])
        out = attend(query, key, value, work, settings, sinks)
    return out.transpose(1, 2).contiguous(), None


attention = torch.compiler.disable(
    attention, reason="the blocks to compute depend on the values of the mask"
)


def _by_transformers(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """sdpa, with the mask as a table."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(mask, Described):
        index = torch.arange(mask.length, device=qkv[0].device)
        mask = mask.spec.dense(index, index)[:, None]
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, *qkv, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return found
