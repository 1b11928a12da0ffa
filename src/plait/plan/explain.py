"""What a plan does to a model, as data: shapes, bytes, heads and collectives, to be shown.

[`Explanation`][plait.plan.explain.Explanation] holds one record for each module and each
collective; its methods put equal layers together. No torch: it can be kept, sent and compared.
"""

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from plait.plan.explain_parts import (
    Call,
    Part,
    block_of,
    grouped,
    in_blocks,
    local_by_kind,
    padded_places,
    shared_heads,
    spans,
    sums,
    tally,
)
from plait.plan.heads import Attention
from plait.plan.rules import generalize


@dataclass(frozen=True)
class Row:
    """Equal modules of several layers.

    Attributes:
        pattern: Their name, `*` for the layer number.
        count: How many there are.
        part: The first of them.
    """

    pattern: str
    count: int
    part: Part

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, texts and numbers."""
        part = self.part
        return {
            "pattern": self.pattern,
            "count": self.count,
            "module": part.module,
            "kind": part.kind,
            "style": part.style or None,
            "origin": part.origin or None,
            "why_whole": part.why or None,
            "params": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "local_shapes": [list(s) for s in p.local],
                    "style": p.style or None,
                    "tied_to": p.tied or None,
                }
                for p in part.params
            ],
            "bytes": part.bytes * self.count,
            "bytes_per_rank": [b * self.count for b in part.local_bytes],
        }


@dataclass(frozen=True)
class Block:
    """Equal layers, or one module outside of the layers.

    Attributes:
        name: The name of the list of layers, or of the module.
        numbers: The layers' numbers; empty outside of a list.
        parts: The parts of one of them.
        attention: The attentions of one of them whose heads are split.
        calls: The collectives of one of them.
    """

    name: str
    numbers: tuple[int, ...]
    parts: tuple[Part, ...]
    attention: tuple[Attention, ...]
    calls: tuple[Call, ...]

    @property
    def count(self) -> int:
        """How many equal layers there are."""
        return max(len(self.numbers), 1)

    @property
    def title(self) -> str:
        """The name with the layers' numbers, `model.layers.0-29`."""
        return f"{self.name}.{spans(self.numbers)}" if self.numbers else self.name

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, texts and numbers."""
        return {
            "name": self.name,
            "layers": list(self.numbers),
            "bytes_per_layer": sum(p.bytes for p in self.parts),
            "bytes_per_layer_and_rank": {
                k: list(v) for k, v in local_by_kind(self.parts).items() if any(v)
            },
            "collectives_per_layer": [
                {**asdict(call), "modules": list(call.modules)} for call in self.calls
            ],
        }


@dataclass(frozen=True)
class Explanation:
    """What a plan does to a model.

    Attributes:
        model: The model's class.
        num_ranks: Ranks it is split over.
        dtype: Dtype of the parameters.
        parts: Every module with parameters or a style, in model order.
        attention: Every attention whose heads are split.
        calls: Collectives of one training step; empty where they are not predicted.
        not_predicted: What is not predicted, and why.
        batch: Sequences and tokens for which the collectives are given.
    """

    model: str
    num_ranks: int
    dtype: str
    parts: tuple[Part, ...]
    attention: tuple[Attention, ...]
    calls: tuple[Call, ...]
    not_predicted: tuple[str, ...]
    batch: tuple[int, int]

    @cached_property
    def rows(self) -> list[Row]:
        """The parts, equal ones of several layers as one row."""

        def alike(part: Part) -> Hashable:
            return (generalize(part.name), part.module, part.style, part.origin, part.params)

        groups = grouped(self.parts, alike)
        return [Row(generalize(g[0].name), len(g), g[0]) for g in groups]

    @property
    def split(self) -> list[Row]:
        """Rows of which something is cut."""
        return [row for row in self.rows if row.part.is_cut]

    @property
    def whole(self) -> list[Row]:
        """Rows that every rank holds whole."""
        return [row for row in self.rows if row.part.params and not row.part.is_cut]

    @property
    def heads(self) -> list[tuple[str, int, Attention]]:
        """Pattern, count and the first of every kind of attention."""
        groups = grouped(self.attention, lambda a: (generalize(a.name), a.heads, a.qk_dim))
        return [(generalize(g[0].name), len(g), g[0]) for g in groups]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(part.bytes for part in self.parts)

    @property
    def local_bytes(self) -> list[int]:
        """Bytes on each rank."""
        return sums([p.local_bytes for p in self.parts], self.num_ranks)

    @property
    def by_kind(self) -> dict[str, tuple[int, list[int]]]:
        """Kind → bytes of the whole and on each rank; kinds without parameters are left out."""
        found = {}
        for kind, local in local_by_kind(self.parts).items():
            whole = sum(part.bytes for part in self.parts if part.kind == kind)
            if whole:
                found[kind] = whole, local
        return found

    @cached_property
    def blocks(self) -> list[Block]:
        """Layers and what is around them, equal layers together, in model order."""
        names: dict[tuple[str, int | None], None] = {}
        for part in self.parts:
            names[block_of(part.name)] = None
        one_by_one = [self._block(*key) for key in names]
        groups = grouped(one_by_one, lambda b: _signature(b))
        return [
            Block(g[0].name, tuple(n for b in g for n in b.numbers), *_content(g[0]))
            for g in groups
        ]

    def _block(self, name: str, number: int | None) -> Block:
        parts, attention, calls = self._by_block
        key = (name, number)
        return Block(
            name,
            () if number is None else (number,),
            tuple(parts.get(key, ())),
            tuple(attention.get(key, ())),
            tuple(calls.get(key, ())),
        )

    @cached_property
    def _by_block(self) -> tuple[Any, Any, Any]:
        return (
            in_blocks(self.parts, lambda p: p.name),
            in_blocks(self.attention, lambda a: a.name),
            in_blocks(self.calls, lambda c: c.modules[0]),
        )

    def tally(self, phase: str) -> dict[str, tuple[int, int]]:
        """Collective → calls and bytes of one phase, or of the whole step for `""`."""
        return tally(self.calls, phase)

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, texts and numbers."""
        batch, length = self.batch
        collectives: dict[str, Any] | None = None
        if self.calls or not self.not_predicted:
            collectives = {
                phase: {k: {"calls": n, "bytes": b} for k, (n, b) in self.tally(phase).items()}
                for phase in ("forward", "backward")
            }
        return {
            "model": self.model,
            "num_ranks": self.num_ranks,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "bytes_per_rank": self.local_bytes,
            "by_kind": {
                k: {"bytes": whole, "bytes_per_rank": local}
                for k, (whole, local) in self.by_kind.items()
            },
            "split": [row.to_dict() for row in self.split],
            "whole": [row.to_dict() for row in self.whole],
            "heads": [_heads_dict(*found) for found in self.heads],
            "blocks": [block.to_dict() for block in self.blocks],
            "collectives": collectives,
            "batch": batch,
            "sequence": length,
            "not_predicted": list(self.not_predicted),
        }


def _heads_dict(pattern: str, count: int, attention: Attention) -> dict[str, Any]:
    heads = attention.heads
    return {
        "pattern": pattern,
        "count": count,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "qk_dim": attention.qk_dim,
        "v_dim": attention.v_dim,
        "query": [list(h) for h in heads.query],
        "key_value": [list(h) for h in heads.kv],
        "shared": list(shared_heads(attention)),
        "padded_places": list(padded_places(attention)),
    }


def _content(block: Block) -> tuple[Any, Any, Any]:
    return block.parts, block.attention, block.calls


def _signature(block: Block) -> Hashable:
    """What makes two layers equal: everything but their number."""
    if not block.numbers:
        return block.name
    return (
        block.name,
        tuple((generalize(p.name), p.module, p.style, p.params) for p in block.parts),
        tuple((generalize(a.name), a.heads, a.qk_dim, a.v_dim) for a in block.attention),
        tuple(
            (tuple(map(generalize, c.modules)), c.phase, c.collective, c.bytes) for c in block.calls
        ),
    )
