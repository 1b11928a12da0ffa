"""`plait inspect` as a picture, with matplotlib."""

from pathlib import Path
from typing import Any

from plait.cli import inspect_text as text
from plait.cli.inspect_css import COLOURS
from plait.errors import PlaitError
from plait.plan.explain import Block, Explanation
from plait.plan.explain_parts import KINDS, Part, padded_places, shared_heads
from plait.plan.heads import Attention

MAX_COLUMNS = 8
_INK, _DIM, _LINE, _TRACK, _Q, _KV = (
    "#1c1f23",
    "#5d6670",
    "#d9dcdf",
    "#eceef0",
    "#0072b2",
    "#b04a8b",
)
_NAME, _COLUMN = 5.4, 4.0  # widths, in units of which an inch has two
_GAP = 0.06
_PER_ROW = 12  # query heads in one line of a cell


def draw(found: Explanation, file: Path) -> None:
    """Write the picture: layers as rows, ranks as columns.

    Args:
        found: What is to be shown.
        file: Where to; the suffix chooses the format (`.png`, `.svg`, `.pdf`).

    Raises:
        PlaitError: There is no matplotlib, or no such format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlaitError(
            "A picture of a plan:", "matplotlib is not installed", "pip install 'plait[plots]'"
        ) from error
    ranks = list(range(found.num_ranks))[:MAX_COLUMNS]
    blocks = [b for b in found.blocks if any(p.params for p in b.parts)]
    heights = [_height(block, ranks, not found.not_predicted) for block in blocks]
    width = _NAME + _COLUMN * len(ranks)
    height = 5.0 + sum(heights)
    figure = Figure(figsize=(width / 2, height / 2), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    top = _title(axes, found, ranks)
    for rank in ranks:
        share = text.percent(found.local_bytes[rank], found.bytes)
        label = f"rank {rank}: {text.size(found.local_bytes[rank])}, {share}"
        axes.text(_x(rank), top, label, size=9, weight="bold", color=_INK, va="center")
        _bar(axes, found.parts, rank, found.bytes, (_x(rank), top + 0.3, 0.22))
    axes.text(0.3, top + 0.41, "of the whole model", size=8, color=_DIM, va="center")
    top += 0.9
    for block, high in zip(blocks, heights, strict=True):
        axes.plot([0.3, width - 0.3], [top, top], color=_LINE, linewidth=0.8)
        _row(axes, block, found, ranks, top)
        top += high
    axes.set_ylim(top + 0.2, 0)
    figure.set_figheight((top + 0.2) / 2)
    try:
        figure.savefig(file)
    except ValueError as error:
        said = str(error).partition("(")[0].strip()
        raise PlaitError(f"A picture {file.name!r}:", said, "a file named .png or .svg") from None


def _x(rank: int) -> float:
    return _NAME + _COLUMN * rank


def _title(axes: Any, found: Explanation, ranks: list[int]) -> float:
    more = f", of which {len(ranks)} are shown" if len(ranks) < found.num_ranks else ""
    axes.text(0.3, 0.55, f"{found.model} over {found.num_ranks} ranks{more}", size=13,
              weight="bold", color=_INK, va="center")  # fmt: skip
    axes.text(
        0.3, 1.1, f"{text.size(found.bytes)} of parameters in {found.dtype}. "
        "Bars: what a rank holds of its row; the full width is one whole layer.",
        size=8.5, color=_DIM, va="center",
    )  # fmt: skip
    y = _legend(axes, found, _x(ranks[-1]) + _COLUMN)
    return y + 0.9


def _legend(axes: Any, found: Explanation, width: float) -> float:
    """Draws the keys, and returns where their last line is."""
    kinds = [(kind, COLOURS[kind], "", False) for kind in found.by_kind]
    lines = [[*kinds, ("hatched: whole on every rank", COLOURS["norms"], "////", False)]]
    if found.attention:
        keys = [("query head", _Q, "", False)]
        keys.append(("key/value head, under its query heads", _KV, "", False))
        if any(shared_heads(a) for a in found.attention):
            keys.append(("needed by several ranks: gathered", _KV, "", True))
        if any(any(padded_places(a)) for a in found.attention):
            keys.append(("computed twice, to fill a place", _DIM, "", True))
        lines.append(keys)
    y = 1.15
    for line in lines:
        x, y = 0.3, y + 0.5
        for label, colour, hatch, hollow in line:
            wide = 0.85 + 0.115 * len(label)
            if x + wide > width and x > 1:
                x, y = 0.3, y + 0.42
            _box(axes, (x, y - 0.13, 0.26), 0.26, colour, hatch, hollow)
            axes.text(x + 0.4, y, label, size=8, color=_INK, va="center")
            x += wide
    return y


def _box(
    axes: Any, at: tuple[float, float, float], width: float, colour: str, hatch: str = "",
    hollow: bool = False,
) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    x, y, high = at
    axes.add_patch(
        Rectangle(
            (x, y), width, high,
            facecolor="white" if hollow else colour,
            edgecolor=colour if hollow else "white",
            linewidth=0.9 if hollow else 0.3,
            linestyle=(0, (2, 1)) if hollow else "-",
            hatch=hatch or None,
        )
    )  # fmt: skip


def _bar(
    axes: Any, parts: tuple[Part, ...], rank: int, whole: int, at: tuple[float, float, float]
) -> None:
    x, y, high = at
    full = _COLUMN - 0.5
    _box(axes, at, full, _TRACK)
    for kind in KINDS:
        for is_cut in (True, False):
            mine = sum(p.local_bytes[rank] for part in parts if part.kind == kind
                       for p in part.params if p.is_cut == is_cut)  # fmt: skip
            if mine:
                width = full * mine / whole
                _box(axes, (x, y, high), width, COLOURS[kind], "" if is_cut else "////")
                x += width


def _calls(block: Block) -> list[str]:
    found = []
    for phase in ("forward", "backward"):
        said = text.calls(block.calls, phase)
        found += [f"{phase}: {one}" for one in said.split("; ") if one]
    return found


def _lines(attention: Attention, rank: int) -> int:
    """Lines of heads in a cell."""
    group = attention.heads.local_group(rank)
    per_line = max(_PER_ROW // group, 1)
    return -(-len(attention.heads.kv[rank]) // per_line)


def _height(block: Block, ranks: list[int], predicted: bool) -> float:
    lines = sum(max(_lines(a, rank) for rank in ranks) for a in block.attention)
    left = 1.1 + 0.3 * len(_calls(block)) * predicted
    return max(left, 0.95 + 0.72 * lines)


def _row(axes: Any, block: Block, found: Explanation, ranks: list[int], top: float) -> None:
    times = f"  × {block.count}" if block.count > 1 else ""
    title = block.title if len(block.title) < 34 else f"…{block.title[-33:]}"
    axes.text(0.3, top + 0.35, title + times, size=9.5, weight="bold", color=_INK, va="center")
    whole = sum(part.bytes for part in block.parts)
    tied = next((q.tied for p in block.parts for q in p.params if q.tied), "")
    said = f"the same tensor as {tied}" if tied else text.size(whole) + " each" * (block.count > 1)
    axes.text(0.3, top + 0.68, said, size=8, color=_DIM, va="center")
    for number, line in enumerate([] if found.not_predicted else _calls(block)):
        axes.text(0.3, top + 1.0 + 0.3 * number, line, size=7.5, color=_DIM, va="center")
    for rank in ranks:
        y = top + 0.2
        for attention in block.attention:
            _heads(axes, attention, rank, y)
            y += 0.72 * max(_lines(attention, r) for r in ranks)
        if not whole:
            axes.text(_x(rank), y + 0.18, "no bytes of its own", size=7.5, color=_DIM, va="center")
            continue
        local = sum(part.local_bytes[rank] for part in block.parts if part.params)
        _bar(axes, block.parts, rank, whole, (_x(rank), y + 0.05, 0.22))
        label = f"{text.size(local)}, {text.percent(local, whole)}"
        axes.text(_x(rank), y + 0.46, label, size=7.5, color=_DIM, va="center")


def _heads(axes: Any, attention: Attention, rank: int, top: float) -> None:
    heads, shared = attention.heads, shared_heads(attention)
    group, places = heads.local_group(rank), heads.places(rank)
    per_line = max(_PER_ROW // group, 1)
    across = min(per_line, len(heads.kv[rank]))
    step = min(0.28, (_COLUMN - 0.5 - _GAP * across) / (across * group))
    seen: set[int] = set()
    for at, kv in enumerate(heads.kv[rank]):
        y = top + 0.72 * (at // per_line)
        x = _x(rank) + (at % per_line) * (group * step + _GAP)
        for place, head in enumerate(places[at * group : (at + 1) * group]):
            left, again = x + place * step, head in seen
            seen.add(head)
            _box(axes, (left, y, 0.26), step - 0.03, _DIM if again else _Q, hollow=again)
            if step > 0.2:
                middle = left + step / 2 - 0.015
                axes.text(middle, y + 0.14, str(head), size=_digits(head), ha="center",
                          va="center", color=_DIM if again else "white")  # fmt: skip
        is_shared, wide = kv in shared, group * step - 0.03
        _box(axes, (x, y + 0.29, 0.26), wide, _KV, hollow=is_shared)
        if wide > 0.2:
            axes.text(x + wide / 2, y + 0.43, str(kv), size=_digits(kv), ha="center", va="center",
                      color=_KV if is_shared else "white")  # fmt: skip


def _digits(number: int) -> float:
    """Size of the digits in a box."""
    return 5.5 if number < 100 else 4.2
