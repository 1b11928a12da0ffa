"""`plait inspect` as tables in the terminal."""

import shutil

from rich.console import Console, JustifyMethod
from rich.table import Table

from plait.cli import inspect_text as text
from plait.plan.explain import Block, Explanation, Row


def show(found: Explanation) -> None:
    """Prints everything."""
    console = Console(highlight=False, width=shutil.get_terminal_size((120, 24)).columns)
    console.print(
        f"{found.model} in {found.dtype}: {text.size(found.bytes)} of parameters. Over "
        f"{found.num_ranks} ranks, each holds {text.held(found)}."
    )
    for title, table in (
        ("What is split", _split(found)),
        ("What stays whole on every rank", _whole(found)),
        ("Heads", _heads(found)),
        ("Bytes on each rank", _bytes(found)),
    ):
        if table.row_count:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(table)
        if title == "Heads":
            for note in dict.fromkeys(n for _, _, a in found.heads for n in text.head_notes(a)):
                console.print(f"- {note}", markup=False)
    _collectives(found, console)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        justify: JustifyMethod = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=not number)
    return table


def _split(found: Explanation) -> Table:
    table = _table(
        "module, shape -> shape on a rank", "class", "style", "rule of", "bytes, on a rank"
    )
    for row in found.split:
        part = row.part
        params = [p for p in part.params if p.is_cut]
        # A weight and its bias are cut alike; the weight says how.
        shown = [p for p in params if len(p.shape) > 1] or params
        tied = next((p.tied for p in params if p.tied), "")
        lines = [f"  {text.shape(p.shape)} -> {text.shapes(p)}" for p in shown]
        if tied:
            lines.append(f"  is {tied}")
        total, local = part.bytes * row.count, [b * row.count for b in part.local_bytes]
        table.add_row(
            "\n".join([_name(row), *lines]),
            part.module,
            text.style(part),
            part.origin,
            "tied" if tied else f"{text.size(total)}\n{text.sizes(local)}",
        )
    return table


def _name(row: Row) -> str:
    return row.pattern if row.count == 1 else f"{row.pattern} (× {row.count})"


def _whole(found: Explanation) -> Table:
    table = _table("module", "class", "bytes", "why", right=("bytes",))
    norms: dict[str, list[Row]] = {}
    for row in found.whole:
        if row.part.kind == "norms":
            norms.setdefault(row.part.why, []).append(row)
            continue
        size = text.size(row.part.bytes * row.count)
        table.add_row(_name(row), row.part.module, size, row.part.why)
    for why, rows in norms.items():
        number, total = sum(r.count for r in rows), sum(r.part.bytes * r.count for r in rows)
        names = dict.fromkeys(row.pattern.rpartition(".")[2] for row in rows)
        kinds = " or ".join(dict.fromkeys(row.part.module for row in rows))
        table.add_row(f"{number} norms", kinds, text.size(total), f"{', '.join(names)}: {why}")
    return table


def _heads(found: Explanation) -> Table:
    ranks = [f"rank {rank}" for rank in range(found.num_ranks)]
    table = _table("attention", "heads", "", *ranks)
    for pattern, count, attention in found.heads:
        maps = attention.heads
        name = pattern if count == 1 else f"{pattern} (× {count})"
        rows = ((maps.num_heads, "query", maps.query), (maps.num_kv_heads, "key/value", maps.kv))
        for number, (total, kind, mine) in enumerate(rows):
            table.add_row("" if number else name, str(total), kind, *map(text.heads, mine))
    return table


def _bytes(found: Explanation) -> Table:
    ranks = [f"rank {rank}" for rank in range(found.num_ranks)]
    table = _table("kind", "whole", *ranks, right=("whole", *ranks))
    for kind, (whole, local) in found.by_kind.items():
        table.add_row(kind, text.size(whole), *_shares(local, whole, found.num_ranks))
    whole = found.bytes
    cells = _shares(found.local_bytes, whole, found.num_ranks)
    table.add_row("all", text.size(whole), *cells, style="bold")
    return table


def _shares(local: list[int], whole: int, num_ranks: int) -> list[str]:
    between = " " if num_ranks <= text.MAX_LISTED else "\n"
    return [f"{text.size(b)}{between}{text.percent(b, whole):>6}" for b in local]


def _collectives(found: Explanation, console: Console) -> None:
    batch, length = found.batch
    console.print(
        f"\n[bold]Collectives of one training step[/bold], {batch} × {length} tokens; bytes of the "
        "whole tensor"
    )
    if found.not_predicted:
        for reason in found.not_predicted:
            console.print(f"not predicted: {reason}", markup=False)
        return
    table = _table("where", "", "collective", "bytes", "what", right=("bytes",))
    for block in found.blocks:
        for number, cells in enumerate(_calls(block)):
            table.add_row("" if number else _title(block), *cells)
    console.print(table)
    for phase in ("forward", "backward"):
        console.print(f"{phase}: {text.calls(found.calls, phase) or 'none'}")


def _title(block: Block) -> str:
    return f"each of {block.title}" if block.count > 1 else block.title


def _calls(block: Block) -> list[tuple[str, ...]]:
    ordered = [c for phase in ("forward", "backward") for c in block.calls if c.phase == phase]
    return [
        (
            c.phase,
            text.NAMES.get(c.collective, c.collective),
            text.size(c.bytes),
            f"{text.causes(c)}: {c.what}",
        )
        for c in ordered
    ]
