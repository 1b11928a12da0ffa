"""Which samples each data rank gets in each step, decided from indices alone.

The batches of the user's sampler are dealt out in order: in step k data rank r gets the batch
k · n + r of n ranks, or, with `split`, its part of batch k. So the samples of a step, over all
ranks, are the same whatever n is, if batches are n times smaller.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import Sampler

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What the data ranks get in one step.

    Attributes:
        sizes: Number of samples of each; 0: none is left for it.
        before: Samples of this epoch before this step, those that were skipped included.
        batches: Batches of the user's before this step, likewise.
        steps: Steps before this one, likewise.
        token: What all ranks must have alike: a text of the samples' indices, or of a batch.
        is_last: Whether the epoch ends with this step; None: nobody knows yet.
    """

    sizes: tuple[int, ...]
    before: int = 0
    batches: int = 0
    steps: int = 0
    token: str = ""
    is_last: bool | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.sizes)


def part_sizes(size: int, num_parts: int) -> list[int]:
    """`size` in parts that differ by one at most, the larger ones first."""
    least, more = divmod(size, num_parts)
    return [least + (part < more) for part in range(num_parts)]


def parts(batch: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """A batch's samples, in parts that differ by one at most."""
    cut, start = [], 0
    for size in part_sizes(len(batch), num_parts):
        cut.append(batch[start : start + size])
        start += size
    return cut


def skipping(batches: Iterable[Sequence[Any]], num_samples: int) -> Iterator[Sequence[Any]]:
    """The batches without the first samples; one that is cut by the border loses its head."""
    for batch in batches:
        if num_samples >= len(batch):
            num_samples -= len(batch)
            continue
        yield batch[num_samples:] if num_samples else batch
        num_samples = 0


def dealt(
    batches: Iterable[Sequence[Any]], num_ranks: int, split: bool, drop_last: bool
) -> Iterator[list[Sequence[Any]]]:
    """For each step the indices of every rank; empty where none is left.

    Args:
        batches: Lists of indices, in order.
        num_ranks: Data ranks.
        split: Whether each batch is split over the ranks, instead of one batch for each.
        drop_last: Whether a step in which not every rank has a batch is left out.
    """
    group: list[Sequence[Any]] = []
    for batch in batches:
        if split:
            yield parts(batch, num_ranks)
            continue
        group.append(batch)
        if len(group) == num_ranks:
            yield group
            group = []
    if group and not drop_last:
        yield group + [[] for _ in range(num_ranks - len(group))]


def with_last(given: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last one; reads one ahead."""
    before = next(given, None)
    while before is not None:
        after = next(given, None)
        yield before, after is None
        before = after


class TurnSampler(Sampler[Any]):
    """A batch sampler that gives one data rank its samples, and remembers what the others get.

    Where none is left for this rank, it gets those of the first one, to be masked.

    Args:
        batches: The user's batch sampler, in the same order on all ranks; or, with `single`, his
            sampler of whole batches.
        rank: This data rank.
        num_ranks: How many there are.
        split: As for `dealt`.
        drop_last: As for `dealt`.
        single: Whether an index stands for a whole batch (`DataLoader(batch_size=None)`).
    """

    def __init__(
        self,
        batches: Any,
        rank: int,
        num_ranks: int,
        *,
        split: bool = False,
        drop_last: bool = False,
        single: bool = False,
    ) -> None:
        self.batches = batches
        self.rank, self.num_ranks = rank, num_ranks
        self.split, self.drop_last, self.single = split, drop_last, single
        self.skip_samples = self.skip_steps = 0
        self.turns: deque[Turn] = deque()

    def __len__(self) -> int:
        """Number of steps of a whole epoch."""
        count = len(self.batches)
        if self.split:
            return count
        return count // self.num_ranks if self.drop_last else -(-count // self.num_ranks)

    def __iter__(self) -> Iterator[Any]:
        self.turns.clear()
        whole = ([index] for index in self.batches) if self.single else map(list, self.batches)
        left = skipping(whole, self.skip_samples)
        before = self.skip_samples
        # Indices are read one step ahead, and no sample: a data set may draw random numbers.
        given = dealt(left, self.num_ranks, self.split, self.drop_last)
        for step, (group, is_last) in enumerate(with_last(given)):
            sizes = tuple(map(len, group))
            if step >= self.skip_steps:
                turn = Turn(sizes, before, steps=step, token=repr(group), is_last=is_last)
                self.turns.append(turn)
                own = group[self.rank] or group[0]
                yield own[0] if self.single else own
            before += sum(sizes)
