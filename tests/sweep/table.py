"""Writes docs/models.md from the results of the sweep.

python -m tests.sweep.table out.json docs/models.md src/plait/build/proven.json

The last file lists the classes whose derived plans need no proof of their own: all their cells are
equal.
"""

import collections
import json
import sys
from pathlib import Path
from typing import Any

from tests.sweep.catalogue import SHAPES, SIZES

COLUMNS = [(shape, size) for shape in SHAPES for size in SIZES if size in SHAPES[shape]]

HEAD = """# Models

What `plait.parallelize` makes of every language model that transformers {version} maps to a head
for text: causal, sequence to sequence, or image and text to text. `make sweep` writes this page.

Each cell is one run: a small copy of the model with the heads that the column names, split over
that many ranks, against the same model in one process, in float64. Compared are logits, loss,
the gradient of every parameter and {tokens} greedily generated tokens.

| sign | meaning |
|---|---|
| ✓ | all equal within 1e-9 of a tensor's largest value (float32 models: 1e-3) |
| ◐ | equal, and each rank holds more than 90 % of the parameters: hardly anything is split |
| – | refused before anything changed; the reason is below |
| ✗ | differs, or fails while running; how is below |
| ∅ | the small copy does not run in one process |

*Held @ 2* is the largest fraction of the small copy's parameters on one of two ranks. Small
copies have large position tables and convolutions beside their matrices; these stay whole.

The plan is *shipped* where transformers brings tensor-parallel rules with the model or a part of
it, else *derived*.

{counts}
"""


IN_PART = ("run on text alone", "no backward")
"""Notes of runs that do not reach all of a model."""


def mark(result: dict[str, Any] | None) -> str:
    """The sign of one cell."""
    if result is None:
        return ""
    status = result["status"]
    if status == "pass":
        return "◐" if result["held"] > 0.9 else "✓"
    return {"refused": "–", "cannot-build": "∅"}.get(status, "✗")


def page(results: list[dict[str, Any]], version: str) -> str:
    """The whole page."""
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = collections.defaultdict(dict)
    for one in results:
        rows[one["name"]][one["shape"], one["size"]] = one
    text = [HEAD.format(version=version, tokens=8, counts=counts(results))]
    kinds = list(dict.fromkeys(name.split("/")[0] for name in rows))
    for kind in kinds:
        names = sorted(name for name in rows if name.startswith(f"{kind}/"))
        text += ["", f"## {kind.capitalize()}", "", *table(names, rows)]
    text += ["", "## Why not", "", *reasons(rows)]
    return "\n".join(text) + "\n"


def table(names: list[str], rows: dict[str, Any]) -> list[str]:
    """The table of one kind of model, a line for each."""
    titles = [f"{shape} {'/'.join(map(str, SHAPES[shape][n]))} @ {n}" for shape, n in COLUMNS]
    lines = ["| model type | plan | held @ 2 | " + " | ".join(titles) + " |"]
    lines.append("|---|---|--:|" + ":-:|" * len(titles))
    for name in names:
        cells = rows[name]
        plan = next((c["plan"] for c in cells.values() if c["plan"]), "")
        marks = [mark(cells.get(column)) for column in COLUMNS]
        two = cells.get(("ordinary", 2), {"held": 0.0})
        held = f"{100 * two['held']:.0f} %" if two["held"] else ""
        lines.append(f"| {name.split('/', 1)[1]} | {plan} | {held} | {' | '.join(marks)} |")
    return lines


def reasons(rows: dict[str, Any]) -> list[str]:
    """What is said about cells that are not equal, each reason once with the cells it holds for."""
    lines = []
    for name in sorted(rows):
        found: dict[str, list[str]] = collections.defaultdict(list)
        for column, one in rows[name].items():
            if one["status"] != "pass":
                word = f"{one['status']}: {clean(one['detail'])}"
                found[word].append(f"{column[0]} @ {column[1]}")
        notes = {note for one in rows[name].values() for note in one.get("notes", ())}
        for note in sorted(notes):
            found[f"not compared: {clean(note)}"] = []
        if found:
            lines.append(f"- **{name}**")
        for word, cells in found.items():
            where = "all" if len(cells) == len(rows[name]) else ", ".join(cells)
            lines.append(f"    - {word}" + (f" ({where})" if where else ""))
    return lines or ["Nothing."]


def clean(text: str) -> str:
    """One line that Markdown leaves as it is."""
    line = " ".join(text.split()).split(" Ways out")[0][:240]
    for sign in "*_<>|[]":
        line = line.replace(sign, f"\\{sign}")
    return line


def counts(results: list[dict[str, Any]]) -> str:
    """How many cells of each column have which sign."""
    signs = ("✓", "◐", "–", "✗", "∅")
    lines = ["| | " + " | ".join(signs) + " |", "|---|" + "--:|" * len(signs)]
    for shape, size in COLUMNS:
        column = [r for r in results if (r["shape"], r["size"]) == (shape, size)]
        if column:
            marks = collections.Counter(mark(one) for one in column)
            cells = " | ".join(str(marks[sign]) for sign in signs)
            lines.append(f"| {shape} @ {size} | {cells} |")
    return "\n".join(lines)


def proven(results: list[dict[str, Any]]) -> list[str]:
    """Classes of which every cell that could be built is equal, in all parts and gradients."""
    by_class: dict[str, list[str]] = collections.defaultdict(list)
    for one in results:
        in_part = any(note.startswith(IN_PART) for note in one.get("notes", ()))
        by_class[one["class_name"]].append("in part" if in_part else one["status"])
    return sorted(
        name
        for name, found in by_class.items()
        if "pass" in found and set(found) <= {"pass", "cannot-build", "refused"}
    )


def main() -> None:
    """The command."""
    import transformers

    source, target, table = map(Path, sys.argv[1:4])
    results = json.loads(source.read_text())
    version = transformers.__version__
    target.write_text(page(results, version))
    listed = {"transformers": version, "classes": proven(results)}
    table.write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
