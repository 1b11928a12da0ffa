"""What a comparison of a whole model and a split one has found."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from plait.plan.rules import generalize

if TYPE_CHECKING:
    from rich.table import Table

Kind = Literal["output", "logits", "loss", "weights", "gradient", "drift", "tokens", "error"]

DECISIVE: tuple[Kind, ...] = ("logits", "loss", "weights", "gradient", "drift", "tokens", "error")
"""Kinds that decide whether the models are the same; outputs in between say where they part."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        module: Name of the module; the model itself is `""`.
        kind: What was compared: a module's `output`; the model's `logits` (and its other outputs)
            and `loss`; `weights`; a `gradient`; whether ranks that hold the same parameter have the
            same gradient (`drift`); generated `tokens`; or an `error` that ended the run.
        name: Which tensor: a parameter's or an output's full name.
        difference: Largest difference on any rank, as a fraction of `scale`; None where there is no
            number.
        scale: The largest value of the whole tensor.
        tolerance: What `difference` may be.
        ok: Whether it is within the tolerance; None: could not be compared.
        note: In words.
    """

    module: str
    kind: Kind
    name: str
    difference: float | None = None
    scale: float = 0.0
    tolerance: float = 0.0
    ok: bool | None = True
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Whether a split model is the whole one, module by module; the same on every rank.

    Attributes:
        rows: Every comparison: outputs in order of execution, then the gradients from the loss
            backwards, then tokens.
        first: The module to look at first where they differ (`""` is the model itself), or None.
        why: What that module does wrong, in words.
        num_ranks: Number of ranks the model was split over.
        dtype: Name of the dtype they ran in.
    """

    rows: tuple[Row, ...]
    first: str | None = None
    why: str = ""
    num_ranks: int = 1
    dtype: str = "float64"

    @property
    def ok(self) -> bool:
        """Whether outputs, loss, every gradient and the tokens are the same."""
        return not any(row.ok is False for row in self.rows)

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.ok is False)

    def largest(self, *kinds: Kind) -> float:
        """The largest difference of some kinds; 0.0 where there is none."""
        found = [r.difference for r in self.rows if r.kind in kinds and r.difference is not None]
        return max(found, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "ok": self.ok,
            "first": self.first,
            "why": self.why,
            "num_ranks": self.num_ranks,
            "dtype": self.dtype,
            "rows": [
                {
                    "module": row.module,
                    "kind": row.kind,
                    "name": row.name,
                    "difference": _finite(row.difference),
                    "scale": row.scale,
                    "tolerance": row.tolerance,
                    "ok": row.ok,
                    "note": row.note,
                }
                for row in self.rows
            ],
        }

    def summary(self) -> str:
        """The verdict in a line or two."""
        compared = sum(row.ok is not None for row in self.rows)
        if self.ok:
            return (
                f"{self.num_ranks} ranks give what one process gives: {compared} comparisons in "
                f"{self.dtype}, largest difference {self.largest(*DECISIVE):.1e}"
            )
        where = repr(self.first) if self.first else "the model itself"
        lines = f"{self.num_ranks} ranks do not give what one process gives."
        return f"{lines}\nFirst difference: {where}: {self.why}"

    def lines(self) -> Iterator[Row]:
        """The rows with those of equal layers made one, which has the largest difference."""
        groups: dict[tuple[Any, ...], Row] = {}
        for row in self.rows:
            shown = _shown(row)
            key = (generalize(shown), row.kind, row.ok, row.note)
            if row.ok is False:
                key = (shown, *key[1:])
            held = groups.get(key)
            if held is None:
                groups[key] = replace(row, name=key[0])
            elif (row.difference or 0.0) > (held.difference or 0.0):
                groups[key] = replace(held, difference=row.difference, scale=row.scale)
        yield from groups.values()

    def table(self) -> "Table":
        """A table for rich, equal layers in one line."""
        from rich.table import Table

        shown = Table(box=None, pad_edge=False, header_style="bold")
        for title, side in (
            ("module", "left"),
            ("compared", "left"),
            ("difference", "right"),
            ("", "left"),
        ):
            shown.add_column(title, justify="right" if side == "right" else "left", no_wrap=False)
        for row in self.lines():
            size = "" if row.difference is None else f"{row.difference:.0e}"
            verdict = {True: "ok", False: "DIFFERS", None: "not compared"}[row.ok]
            style = {True: "", False: "bold red", None: "dim"}[row.ok]
            note = f"{verdict}: {row.note}" if row.note else verdict
            shown.add_row(row.name, row.kind, size, note, style=style)
        return shown

    def __str__(self) -> str:
        lines = [self.summary()]
        for row in [row for row in self.lines() if row.ok is False][:20]:
            size = "" if row.difference is None else f" {row.difference:.1e} of {row.scale:.1e}"
            lines.append(f"  {row.kind} {row.name}:{size} {row.note}".rstrip())
        return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.kind in ("output", "error"):
        return row.module or "(model)"
    return row.name


def _finite(x: float | None) -> float | None:
    return None if x is None or x == float("inf") else x
