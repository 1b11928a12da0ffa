"""`plait inspect` as one HTML file that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape

from plait.cli import inspect_text as text
from plait.cli.inspect_css import COLOURS, CSS, SCRIPT
from plait.plan.explain import Block, Explanation, Row
from plait.plan.explain_parts import KINDS, Call, Part, padded_places, shared_heads
from plait.plan.heads import Attention

MAX_NUMBERED = 1000
"""Heads with larger numbers are drawn without them."""


def page(found: Explanation) -> str:
    """The page as text; every name is escaped, and nothing is loaded from elsewhere."""
    body = "\n".join([*_head(found), *_ranks(found), *_layers(found), *_tables(found)])
    title = escape(f"{found.model} over {found.num_ranks} ranks")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n"
        f'<div id="tip" role="tooltip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _head(found: Explanation) -> list[str]:
    kinds = [
        f'<span><i class="key" style="background:{COLOURS[kind]}"></i>{kind}</span>'
        for kind in found.by_kind
    ]
    striped = f'<i class="key whole" style="background-color:{COLOURS["norms"]}"></i>'
    return [
        f"<h1>{escape(found.model)} over {found.num_ranks} ranks</h1>",
        f"<p>{text.size(found.bytes)} of parameters in {escape(found.dtype)}. "
        f"Each rank holds {text.held(found)}.</p>",
        f'<div class="legend">{"".join(kinds)}<span>{striped}striped: every rank holds all of '
        "it</span></div>",
    ]


def _ranks(found: Explanation) -> list[str]:
    rows = []
    for rank, local in enumerate(found.local_bytes):
        bar = _bar(found.parts, rank, found.bytes)
        share = text.percent(local, found.bytes)
        rows.append(
            f'<span>rank {rank}</span>{bar}<span class="size">{text.size(local)} · {share}</span>'
        )
    return [
        "<h2>Bytes on each rank</h2>",
        f'<p class="dim">The full width is the whole model, {text.size(found.bytes)}.</p>',
        f'<div class="ranks">{"".join(rows)}</div>',
    ]


def _bar(parts: Sequence[Part], rank: int, whole: int) -> str:
    """What one rank holds of some parts, as a bar whose full width is all of them."""
    segments = []
    for kind in KINDS:
        for is_cut, what in ((True, "its part"), (False, "all of it, as every rank")):
            mine = sum(
                param.local_bytes[rank]
                for part in parts
                for param in part.params
                if part.kind == kind and param.is_cut == is_cut
            )
            if not mine:
                continue
            total = sum(
                param.bytes
                for part in parts
                for param in part.params
                if part.kind == kind and param.is_cut == is_cut
            )
            tip = f"{kind}: {text.size(mine)} of {text.size(total)}, {what}"
            segments.append(
                f'<i class="{"" if is_cut else "whole"}" style="width:{100 * mine / whole:.3f}%;'
                f'background-color:{COLOURS[kind]}" data-tip="{escape(tip)}"></i>'
            )
    return f'<div class="bar">{"".join(segments)}</div>'


def _layers(found: Explanation) -> list[str]:
    cells = ['<div class="top"></div>']
    cells += [f'<div class="top">rank {rank}</div>' for rank in range(found.num_ranks)]
    for block in found.blocks:
        if not any(part.params for part in block.parts):
            continue
        cells.append(_layer(block, bool(found.not_predicted)))
        cells += [_cell(block, rank) for rank in range(found.num_ranks)]
    narrowest = "11rem" if found.num_ranks <= text.MAX_LISTED else "7.5rem"
    columns = f"minmax(13rem, 17rem) repeat({found.num_ranks}, minmax({narrowest}, 1fr))"
    return [
        "<h2>Layers</h2>",
        '<p class="dim">Bars: what a rank holds of this row; the full width is one whole layer. '
        "Equal layers are one row. Collectives of one layer in a training step of "
        f"{found.batch[0]} × {found.batch[1]} tokens: → forward, ← backward. Point at anything for "
        "details.</p>",
        *(_heads_legend(found) if found.attention else []),
        f'<div class="scroll"><div class="grid" style="grid-template-columns:{columns}">',
        *cells,
        "</div></div>",
    ]


def _heads_legend(found: Explanation) -> list[str]:
    shown = [
        '<span><i class="q">3</i>query head 3</span>',
        '<span><i class="kv">1</i>key/value head 1, under its query heads</span>',
    ]
    if any(shared_heads(a) for a in found.attention):
        shown.append('<span><i class="kv shared">1</i>other ranks need it too: gathered</span>')
    if any(any(padded_places(a)) for a in found.attention):
        shown.append('<span><i class="q again">4</i>computed twice, to fill a place</span>')
    return [f'<div class="legend">{"".join(shown)}</div>']


def _layer(block: Block, unknown: bool) -> str:
    times = f' <span class="times">× {block.count}</span>' if block.count > 1 else ""
    split = [p for p in block.parts if p.is_cut]
    tip = "\n".join(f"{_short(block, p.name)}: {text.style(p)}".replace("\n", ", ") for p in split)
    size = text.size(sum(part.bytes for part in block.parts))
    tied = next((q.tied for p in block.parts for q in p.params if q.tied), "")
    what = f"the same tensor as {escape(tied)}" if tied else size + " each" * (block.count > 1)
    kinds = ", ".join(dict.fromkeys(p.module for p in block.parts if not block.numbers))
    lines = "" if unknown else _call_lines(block.calls)
    return (
        f'<div class="layer"{_tip(tip)}><b>{escape(block.title)}{times}</b>'
        f'<span class="size">{escape(kinds)}{" · " * bool(kinds)}{what}</span>{lines}</div>'
    )


def _short(block: Block, name: str) -> str:
    return ".".join(name.removeprefix(block.name).strip(".").split(".")[1:]) or name


def _call_lines(calls: Sequence[Call]) -> str:
    lines = []
    for phase, arrow in (("forward", "→"), ("backward", "←")):
        some = [f"{text.causes(c)}: {c.what}, {text.size(c.bytes)}" for c in calls
                if c.phase == phase]  # fmt: skip
        sums = text.calls(calls, phase)
        if sums:
            lines.append(
                f"<div{_tip(chr(10).join(some))}><span>{arrow}</span>"
                f"<span>{escape(sums)}</span></div>"
            )
    return f'<div class="calls">{"".join(lines)}</div>' if lines else ""


def _cell(block: Block, rank: int) -> str:
    drawn = "".join(_heads(a, rank, len(block.attention) > 1) for a in block.attention)
    whole = sum(part.bytes for part in block.parts)
    local = sum(part.local_bytes[rank] for part in block.parts if part.params)
    if whole:
        bar = _bar(block.parts, rank, whole)
        bar += f'<span class="size">{text.size(local)} · {text.percent(local, whole)}</span>'
    else:
        bar = '<span class="size">no bytes of its own</span>'
    return f'<div class="cell"><span class="rank">rank {rank}</span>{drawn}{bar}</div>'


def _heads(attention: Attention, rank: int, named: bool) -> str:
    heads, shared = attention.heads, shared_heads(attention)
    seen: set[int] = set()
    groups = []
    size = heads.local_group(rank)
    places = heads.places(rank)
    numbered = heads.num_heads <= MAX_NUMBERED
    for at, kv in enumerate(heads.kv[rank]):
        squares = []
        for head in places[at * size : (at + 1) * size]:
            again = head in seen
            seen.add(head)
            tip = f"query head {head}" + " again: it fills a place" * again
            label = str(head) if numbered else ""
            squares.append(f'<i class="q{" again" * again}" data-tip="{tip}">{label}</i>')
        others = [str(r) for r, found in enumerate(heads.kv) if kv in found and r != rank]
        tip = f"key/value head {kv}"
        if kv in shared:
            tip += f", also needed by rank {' and '.join(others)}: each stores a part"
        groups.append(
            f'<div class="group"><div>{"".join(squares)}</div>'
            f'<i class="kv{" shared" * (kv in shared)}" data-tip="{tip}">{kv}</i></div>'
        )
    title = f"<small>{escape(attention.name.rpartition('.')[2])}</small>" if named else ""
    return f'{title}<div class="heads">{"".join(groups)}</div>'


def _tables(found: Explanation) -> list[str]:
    notes = dict.fromkeys(n for _, _, a in found.heads for n in text.head_notes(a))
    parts = [f"<p>{escape(note[0].upper() + note[1:])}.</p>" for note in notes]
    parts += ["<h2>What is split</h2>"]
    titles = ["module", "class", "style", "rule of", "whole", "on a rank", "bytes", "on a rank"]
    parts += _table(titles, (_split_cells(row) for row in found.split), {6, 7})
    parts += ["<h2>What stays whole on every rank, and why</h2>"]
    rows = ((_named(r), r.part.module, text.size(r.part.bytes * r.count), r.part.why)
            for r in found.whole)  # fmt: skip
    parts += _table(["module", "class", "bytes", "why"], rows, {2})
    batch, length = found.batch
    parts += [f"<h2>Collectives of one training step of {batch} × {length} tokens</h2>"]
    if found.not_predicted:
        return [*parts, *(f"<p>Not predicted: {escape(r)}</p>" for r in found.not_predicted)]
    rows = (
        (phase, text.NAMES.get(kind, kind), str(number), text.size(total))
        for phase in ("forward", "backward")
        for kind, (number, total) in sorted(found.tally(phase).items())
    )
    parts += ['<p class="dim">Bytes of the whole tensors.</p>']
    parts += _table(["phase", "collective", "calls", "bytes"], rows, {2, 3})
    return parts


def _split_cells(row: Row) -> tuple[str, ...]:
    part = row.part
    shown = [p for p in part.params if p.is_cut] or list(part.params)
    tied = next((p.tied for p in shown if p.tied), "")
    return (
        _named(row),
        part.module,
        text.style(part),
        part.origin,
        "\n".join(f"{p.name} {text.shape(p.shape)}" for p in shown),
        "\n".join(text.shapes(p) for p in shown),
        f"in {tied}" if tied else text.size(part.bytes * row.count),
        "" if tied else text.sizes([b * row.count for b in part.local_bytes]),
    )


def _named(row: Row) -> str:
    return row.pattern if row.count == 1 else f"{row.pattern} (× {row.count})"


def _table(titles: list[str], rows: Iterable[Sequence[str]], right: set[int]) -> list[str]:
    def cells(tag: str, values: Sequence[str]) -> str:
        made = []
        for at, value in enumerate(values):
            shown = "<br>".join(escape(line) for line in value.split("\n"))
            made.append(f"<{tag}{' class=n' * (at in right)}>{shown}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    lines = [cells("td", row) for row in rows]
    return ['<div class="scroll"><table>', cells("th", titles), *lines, "</table></div>"]


def _tip(words: str) -> str:
    return f' data-tip="{escape(words)}"' if words else ""
