"""What a rank is about to do, as words in shared memory: written, compared, explained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.comm.link.segment import HEADER_WORDS

_KINDS = (
    "refused",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "exchange",
    "all_to_all",
)
_OPS = ("", "sum", "max")
_DTYPES = (
    None,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_FIXED = 8
NUM_BYTES = 6
SHAPE = _FIXED


@dataclass(frozen=True, eq=False, slots=True)
class Header:
    """A collective as its ranks must agree on it.

    Attributes:
        row: The words to store, for the others to read.
        signature: A hash of what must be equal on all ranks (tuples of integers hash alike in
            every process); ranks compare signatures, and read rows only where they differ.
    """

    row: list[int]
    signature: int


def header(
    kind: str,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] = (),
    *,
    op: str = "",
    dim: int = -1,
    src: int = -1,
    sizes: Sequence[int] | None = None,
    num_bytes: int = 0,
) -> Header:
    """The header of a collective.

    For an all-gather the extent along `dim` belongs to the rank and is not compared; nor is the
    shape of an all-to-all, the lengths of what the rank sends and expects; `num_bytes` never is.
    """
    code = _DTYPES.index(dtype) if dtype in _DTYPES else -1
    sizes = () if sizes is None else sizes
    front = [_KINDS.index(kind), code, _OPS.index(op), dim, src, len(shape)]
    row = [*front, num_bytes, len(sizes), *shape, *sizes][:HEADER_WORDS]
    common = [-1 if kind == "all_gather" and d == dim else n for d, n in enumerate(shape)]
    common = [len(shape)] if kind == "all_to_all" else common
    return Header(row, hash((*front, *common, *sizes)))


def describe(row: Sequence[int]) -> str:
    """A header in words."""
    kind, code, op, dim, src, num_dims, num_bytes, num_sizes = row[:_FIXED]
    name = _KINDS[kind] if 0 <= kind < len(_KINDS) else "an unknown collective"
    if name == "exchange":
        return f"exchange of a control message of {num_bytes} bytes"
    dtype = str(_DTYPES[code]).removeprefix("torch.") if code >= 0 else "?"
    shape = tuple(row[_FIXED : _FIXED + num_dims])
    if name == "all_to_all":
        half = num_dims // 2
        return (
            f"all_to_all of {dtype}, sending {list(shape[:half])}, expecting {list(shape[half:])}"
        )
    text = f"{name} of {dtype} {shape}"
    if op:
        text += f" ({_OPS[op]})"
    if dim >= 0:
        text += f" along dim {dim}"
    if src >= 0:
        text += f" from group rank {src}"
    if num_sizes:
        text += f" in sizes {list(row[_FIXED + num_dims : _FIXED + num_dims + num_sizes])}"
    return text
