"""What transformers' composed mask functions mean, read from how they were composed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from plait.errors import PlanError

_LOCALS = ".<locals>."


@dataclass(frozen=True)
class Meaning:
    """A mask function in words; the sequence it is about is not among them.

    Attributes:
        causal: Nobody looks ahead.
        window: As `MaskSpec.window`.
        chunk: Tokens per chunk.
        left_padding: `[batch]`, tokens before the first chunk begins.
        documents: `[batch, seq]`, which packed document each token is of.
        positions: `[batch, seq]`, places inside of documents.
        blocks: `[batch, seq]`, tokens that see each other; below 0: of no block.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    left_padding: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None


def meaning_of(mask_function: Callable[..., Any]) -> Meaning:
    """Read a mask function.

    Args:
        mask_function: As `transformers.masking_utils` composes them.

    Raises:
        PlanError: Some part of it is none of transformers' own.
    """
    return _read(mask_function, Meaning())


def _read(fn: Callable[..., Any], found: Meaning) -> Meaning:
    name = getattr(fn, "__qualname__", repr(fn))
    outer = name.partition(_LOCALS)[0]
    reader = _READERS.get(outer) if getattr(fn, "__module__", "") == _HOME else None
    if reader is None:
        raise PlanError(
            f"The mask function {getattr(fn, '__module__', '?')}.{name}:",
            "plait's attention computes masks from descriptions, and has none for it",
            (
                "another attn_implementation, on one rank or without cp_size and sp_size",
                "masks that transformers composes: causal, sliding, chunked, packed, padded",
            ),
        )
    return reader(_cells(fn), found)


def _cells(fn: Any) -> dict[str, Any]:
    code = getattr(fn, "__code__", None)
    names = () if code is None else code.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in fn.__closure__ or ()), strict=True))


def _all(cells: dict[str, Any], found: Meaning) -> Meaning:
    for part in cells["mask_functions"]:
        found = _read(part, found)
    return found


def _any(cells: dict[str, Any], found: Meaning) -> Meaning:
    """A union: of a mask with blocks, which is the one that descriptions have."""
    parts = [_read(part, Meaning()) for part in cells["mask_functions"]]
    plain = [part for part in parts if part.blocks is None]
    blocks = [part.blocks for part in parts if part.blocks is not None]
    if len(plain) != 1 or len(blocks) != 1:
        raise PlanError(
            "A union of masks:",
            f"plait has descriptions for one mask and one set of blocks, not for {len(parts)}",
            "another attn_implementation, on one rank or without cp_size and sp_size",
        )
    return replace(plain[0], blocks=blocks[0])


_HOME = "transformers.masking_utils"
_READERS: dict[str, Callable[[dict[str, Any], Meaning], Meaning]] = {
    "causal_mask_function": lambda cells, found: replace(found, causal=True),
    "bidirectional_mask_function": lambda cells, found: found,
    "and_masks": _all,
    "or_masks": _any,
    "sliding_window_overlay": lambda cells, found: replace(found, window=cells["sliding_window"]),
    "sliding_window_bidirectional_overlay": lambda cells, found: replace(
        found, window=cells["sliding_window"]
    ),
    "chunked_overlay": lambda cells, found: replace(
        found, chunk=cells["chunk_size"], left_padding=cells["left_padding"]
    ),
    "blockwise_overlay": lambda cells, found: replace(found, blocks=cells["block_sequence_ids"]),
    "packed_sequence_mask_function": lambda cells, found: replace(
        found, documents=cells["packed_sequence_mask"]
    ),
    "remap_positions_for_packed_sequence": lambda cells, found: _read(
        cells["mask_function"], replace(found, positions=cells["position_ids"])
    ),
}
