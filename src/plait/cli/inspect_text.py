"""Words and numbers that the table and the pictures of `plait inspect` have in common."""

from collections import Counter
from collections.abc import Iterable, Sequence

from plait.plan.explain import Explanation
from plait.plan.explain_parts import Call, Param, Part, padded_places, shared_heads, spans, tally
from plait.plan.heads import Attention

MAX_LISTED = 4
"""With more ranks than these, values are counted and not listed."""

NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


def size(num_bytes: float) -> str:
    """Bytes as people read them.

    >>> size(1_500_000)
    '1.5 MB'
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def sizes(num_bytes: Sequence[int]) -> str:
    """Bytes on each rank; one figure where all have the same."""
    return by_rank([size(b) for b in num_bytes])


def by_rank(values: Sequence[str]) -> str:
    """What each rank has; one value where all are alike, counts where the ranks are many.

    >>> by_rank(["3", "3", "2"])
    '3 | 3 | 2'
    """
    counts = Counter(values)
    if len(counts) == 1:
        return values[0]
    if len(values) <= MAX_LISTED:
        return " | ".join(values)
    return ", ".join(f"{value} on {number}" for value, number in counts.items())


def shape(found: Sequence[int]) -> str:
    """A shape.

    >>> shape((4, 3))
    '4×3'
    """
    return "×".join(map(str, found)) or "1"


def shapes(param: Param) -> str:
    """The shape on each rank; one where all are the same."""
    return by_rank([shape(local) for local in param.local])


def style(part: Part) -> str:
    """A part's style; those of its parameters that have rules of their own."""
    single = [f"{p.name}: {p.style}" for p in part.params if p.style]
    return "\n".join([*([part.style] if part.style else []), *single])


def percent(part: float, whole: float) -> str:
    """A share of a whole."""
    return f"{part / whole:.1%}" if whole else "-"


def held(found: Explanation) -> str:
    """What each rank holds, in bytes and as a share."""
    local = found.local_bytes
    shares = by_rank([percent(b, found.bytes) for b in local])
    return f"{sizes(local)} ({shares} of the whole)"


def calls(found: Iterable[Call], phase: str) -> str:
    """The collectives of a phase in one line: how many of which kind, and their bytes."""
    sums = sorted(tally(found, phase).items())
    return "; ".join(
        f"{number:,} {NAMES.get(kind, kind)}{'s' * (number > 1)}, {size(total)}"
        for kind, (number, total) in sums
    )


def heads(found: Sequence[int]) -> str:
    """Head numbers as stretches."""
    return spans(found).replace(",", ", ")


def head_notes(attention: Attention) -> list[str]:
    """What is out of the ordinary with the heads of an attention, in sentences."""
    notes = []
    shared, padded = shared_heads(attention), padded_places(attention)
    if shared:
        what = "heads" if len(shared) > 1 else "head"
        does = "are" if len(shared) > 1 else "is"
        notes.append(
            f"key/value {what} {heads(shared)} {does} used by several ranks: stored once, in "
            "parts, and gathered when used"
        )
    for rank, places in enumerate(padded):
        if places:
            notes.append(
                f"rank {rank} computes {places} head{'s' * (places > 1)} twice, so that each of "
                "its key/value heads meets as many query heads"
            )
    return notes


def causes(call: Call) -> str:
    """The modules that cause a collective, siblings by their last names."""
    words, above = [], None
    for name in call.modules:
        parent, _, last = ".".join(_after_layer(name)).rpartition(".")
        words.append(last if parent == above or not parent else f"{parent}.{last}")
        above = parent
    return ", ".join(dict.fromkeys(words))


def _after_layer(name: str) -> list[str]:
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return parts[numbers[0] + 1 :] if numbers else parts
