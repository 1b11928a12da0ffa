"""What the ranks have told each other, judged: the same on all of them, or the first difference."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.consistency.fingerprints import Entry
from plait.errors import RankError

_ABSENT: Entry = ("not there", "", None)


@dataclass(frozen=True)
class Message:
    """What one rank says at one point.

    Attributes:
        point: Where it is, with its number: `"forward 7"`.
        count: How often it has called the model and stepped: `"7 forwards, 2 optimizer steps"`.
        place: File and line of the program.
        entries: What must agree, by name.
    """

    point: str
    count: str
    place: str
    entries: Mapping[str, Entry] = field(default_factory=dict)


def judge(
    asked: str, told: Sequence[Message], ranks: Sequence[int], tolerance: float = 0.0
) -> RankError | None:
    """The error that the messages of all ranks amount to, or None where they agree.

    Args:
        asked: What is guarded.
        told: One message a rank.
        ranks: Their global ranks.
        tolerance: How far sketches may be apart, as a fraction of the norm.
    """
    points = [f"{message.point}, after {message.count}" for message in told]
    if len(set(points)) > 1:
        return _error(
            f"{asked}: the ranks are not at the same point.",
            [
                f"rank {rank} is at {point} ({message.place})"
                for rank, point, message in zip(ranks, points, told, strict=True)
            ],
            points,
            ranks,
            "call the model and step the optimizer equally often on all ranks",
        )
    names = list(dict.fromkeys(name for message in told for name in message.entries))
    for name in names:
        entries = [message.entries.get(name, _ABSENT) for message in told]
        kinds = _kinds(entries, tolerance)
        if len(set(kinds)) == 1:
            continue
        shown = [f"{text} with the checksum {bits}" if bits else text for text, bits, _ in entries]
        return _error(
            f"{asked}: {name} differs between the ranks at {told[0].point} ({told[0].place}).",
            [f"rank {rank}: {text}" for rank, text in zip(ranks, shown, strict=True)],
            kinds,
            ranks,
            _way_out(name),
        )
    return None


def _kinds(entries: Sequence[Entry], tolerance: float) -> list[str]:
    """A label for each rank: equal where its entry is taken for equal."""
    labels: list[str] = []
    for position, (text, bits, own) in enumerate(entries):
        label = f"{text} {bits}"
        for other in range(position):
            theirs = entries[other][2]
            if own is None or theirs is None or entries[other][0] != text:
                continue
            scale = max(own[0], theirs[0])
            if all(abs(a - b) <= tolerance * scale for a, b in zip(own, theirs, strict=True)):
                label = labels[other]
                break
        labels.append(label)
    return labels


def _error(
    asked: str, problems: list[str], kinds: Sequence[str], ranks: Sequence[int], way_out: str
) -> RankError:
    """Also names the ranks that are in the minority, where there is one."""
    (most, number), *others = Counter(kinds).most_common()
    odd = [rank for rank, kind in zip(ranks, kinds, strict=True) if kind != most]
    if others and number > others[0][1]:
        named = ", ".join(str(rank) for rank in odd)
        problems = [*problems, f"so rank {named} differs from the {number} others that agree"]
    return RankError(asked, problems, way_out, rank=odd[0])


def _way_out(name: str) -> str:
    if name.startswith("gradient of"):
        return (
            "the parameter is used on split activations: give its module the style "
            "'replicated_with_grad_allreduce'; for kernels that add in no fixed order: tolerance="
        )
    if name.startswith("parameter"):
        return "plait.adopt(model) for what was put in later; change parameters on all ranks alike"
    return "give every rank of the tensor-parallel group the same batch, seed and settings"
