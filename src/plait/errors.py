"""The errors plait raises, all in one form: what was asked, what stands in the way, the ways out.

Every error is a [`PlaitError`][plait.errors.PlaitError], which is a `ValueError`, so a caller
who catches `ValueError` around a library that plait replaced keeps working.
"""

from collections.abc import Sequence


class PlaitError(ValueError):
    """Something was asked that plait cannot or must not do.

    Args:
        asked: What the caller asked for, in one line, with its numbers.
        problems: What stands in the way; every problem of the kind, not only the first.
        ways_out: Up to three things the caller can do, most likely first.
    """

    def __init__(
        self, asked: str, problems: str | Sequence[str] = (), ways_out: str | Sequence[str] = ()
    ) -> None:
        self.asked = asked
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.ways_out = (ways_out,) if isinstance(ways_out, str) else tuple(ways_out)
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.asked]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.ways_out:
            lines.append("Ways out:")
            lines += [f"  {n}. {way}" for n, way in enumerate(self.ways_out, 1)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.asked, self.problems, self.ways_out)


class LayoutError(PlaitError):
    """The parallel sizes do not fit the processes, the model or the input."""


class PlanError(PlaitError):
    """A plan names a style, module or parameter that does not exist or cannot be split."""


class WeightsError(PlaitError):
    """A checkpoint file is missing, damaged, or does not hold what the model needs."""


class CheckpointError(PlaitError):
    """A saved training state is incomplete or damaged."""


class RankError(PlaitError):
    """Another rank failed, left, or asked for a different collective.

    Args:
        rank: The global rank that failed, where it is known.
    """

    def __init__(
        self,
        asked: str,
        problems: str | Sequence[str] = (),
        ways_out: str | Sequence[str] = (),
        rank: int | None = None,
    ) -> None:
        super().__init__(asked, problems, ways_out)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple]:  # type: ignore[type-arg]
        return type(self), (self.asked, self.problems, self.ways_out, self.rank)
