"""What a comparison of a whole model and a split one has found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plait.plan.rules import generalize

if TYPE_CHECKING:
    from rich.table import Table

Kind = Literal["output", "logits", "loss", "weights", "gradient", "drift", "tokens", "error"]

DECISIVE: tuple[Kind, ...] = ("logits", "loss", "weights", "gradient", "drift", "tokens", "error")
"""Kinds that decide whether the models are the same; outputs in between say where they part."""


_NOT_MET = ("RankError: ", "TimeoutError: ", "Dist")
"""How failures begin that say only that ranks did not meet."""


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
class Line:
    """What the rows of one module, of equal layers, or of one kind of result say together.

    Attributes:
        name: The module, with `*` for the number of a layer; or the kind.
        output: Largest difference of outputs; None where there is none.
        gradient: Largest difference of gradients.
        ok: False where any differs, None where one could not be compared.
        notes: In words.
    """

    name: str
    output: float | None = None
    gradient: float | None = None
    ok: bool | None = True
    notes: tuple[str, ...] = ()

    def joined(self, row: Row) -> "Line":
        """The line with one row more."""
        is_gradient = row.kind in ("gradient", "drift")
        verdicts = (self.ok, row.ok)
        note = "fails" if row.kind == "error" else row.note
        return Line(
            self.name,
            self.output if is_gradient else _larger(self.output, row.difference),
            _larger(self.gradient, row.difference) if is_gradient else self.gradient,
            False if False in verdicts else None if None in verdicts else True,
            self.notes if note in ("", *self.notes) else (*self.notes, note),
        )


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
        not_reached: Rules of the plan whose modules and parameters the batch did not reach, where
            all else is the same. The comparison says nothing about them.
    """

    rows: tuple[Row, ...]
    first: str | None = None
    why: str = ""
    num_ranks: int = 1
    dtype: str = "float64"
    not_reached: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether outputs, loss, every gradient and the tokens are the same."""
        return not any(row.ok is False for row in self.rows)

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.ok is False)

    @property
    def no_verdict(self) -> str:
        """Why a failure is no difference: the ranks did not meet. Empty otherwise."""
        rows = (row for row in self.wrong if row.kind == "error")
        return next((row.note for row in rows if row.note.startswith(_NOT_MET)), "")

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
            "not_reached": list(self.not_reached),
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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` has given."""
        rows = tuple(Row(**row) for row in data["rows"])
        missed = tuple(data.get("not_reached", ()))
        return cls(rows, data["first"], data["why"], data["num_ranks"], data["dtype"], missed)

    def summary(self) -> str:
        """The verdict in a line or two."""
        compared = sum(row.ok is not None for row in self.rows)
        if self.ok:
            missed = ", ".join(self.not_reached)
            return (
                f"{self.num_ranks} ranks give what one process gives: {compared} comparisons in "
                f"{self.dtype}, largest difference {self.largest(*DECISIVE):.1e}"
                + (f"\nThe batch does not reach {missed}" if missed else "")
            )
        where = repr(self.first) if self.first else "the model itself"
        lines = f"{self.num_ranks} ranks do not give what one process gives."
        return f"{lines}\nFirst difference: {where}: {self.why}"

    def lines(self) -> list[Line]:
        """One line a module, in order of execution; equal layers in one; then the results."""
        wrong = {row.module for row in self.wrong} | {self.first}
        lines: dict[str, Line] = {}
        for row in self.rows:
            if row.kind in ("output", "gradient", "drift", "error") and row.module:
                name = row.module if row.module in wrong else generalize(row.module)
            else:
                name = row.kind
            line = lines.setdefault(name, Line(name))
            lines[name] = line.joined(row)
        inner = [line for line in lines.values() if line.name not in DECISIVE]
        return inner + [lines[kind] for kind in DECISIVE if kind in lines]

    def table(self) -> "Table":
        """A table for rich: largest difference of each module's outputs and gradients."""
        from rich.table import Table

        shown = Table(box=None, pad_edge=False, header_style="bold")
        shown.add_column("module", no_wrap=True)
        shown.add_column("output", justify="right", no_wrap=True)
        shown.add_column("gradient", justify="right", no_wrap=True)
        shown.add_column("")
        for line in self.lines():
            numbers = ["" if x is None else f"{x:.0e}" for x in (line.output, line.gradient)]
            verdict = {True: "ok", False: "DIFFERS", None: "not compared"}[line.ok]
            style = {True: "", False: "bold red", None: "dim"}[line.ok]
            notes = f"{verdict}: {', '.join(line.notes)}" if line.notes else verdict
            if line.name == self.first:
                notes, style = f"{notes}  <- look here first", "bold red"
            shown.add_row(line.name, *numbers, notes, style=style)
        return shown

    def __str__(self) -> str:
        lines = [self.summary()]
        for row in self.wrong[:20]:
            size = "" if row.difference is None else f" {row.difference:.1e} of {row.scale:.1e}"
            lines.append(f"  {row.kind} {row.name or row.kind}:{size} {row.note}".rstrip())
        return "\n".join(lines)


def _larger(x: float | None, y: float | None) -> float | None:
    return y if x is None else x if y is None else max(x, y)


def _finite(x: float | None) -> float | None:
    return None if x is None or x == float("inf") else x
