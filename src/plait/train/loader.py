"""A data loader over a layout: each data rank its own samples, a tensor-parallel group the same.

Every step is taken by all ranks. Where the last samples do not suffice for all data ranks, a rank
without any gets a copy of the first one's batch that is marked, so that it counts in no loss of a
model; no sample is seen twice.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from plait import comm
from plait.train import batches as contents
from plait.train import sources
from plait.train.agreement import compare_first
from plait.train.places import Places
from plait.train.sequences import rules_of, split_batch
from plait.train.turns import Turn, with_last

Batches = Iterator[tuple[Any, Turn]]


class Running:
    """The loaders that are being iterated, the innermost last."""

    def __init__(self) -> None:
        self._loaders: list[DataRankLoader] = []

    @property
    def current(self) -> "DataRankLoader | None":
        """The loader that gave the last batch, while its loop goes on."""
        return self._loaders[-1] if self._loaders else None

    def begin(self, loader: "DataRankLoader") -> None:
        """A loop over a loader begins."""
        self._loaders.append(loader)

    def end(self, loader: "DataRankLoader") -> None:
        """It ends, or is broken off."""
        if loader in self._loaders:
            self._loaders.remove(loader)


class DataRankLoader:
    """What one rank reads of a `DataLoader`; made by [`data_loader`][plait.train.data_loader].

    Attributes:
        loader: The user's own.
        places: Which ranks see the same samples.
        turn: What all data ranks got in the step of the last batch.
        is_last: Whether the last batch given was the last of the epoch.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        source: "sources.Source",
        places: Places,
        place: Callable[[Any], Any],
        running: Running | None,
    ) -> None:
        self.loader, self.places = loader, places
        self.turn, self.is_last = Turn((0,)), False
        self._source, self._place = source, place
        self._running = running or Running()
        self._epoch, self._begun = 0, False
        self._at = {"samples": 0, "batches": 0, "steps": 0}
        self._pending: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Number of steps of a whole epoch."""
        return len(self._source)

    @property
    def epoch(self) -> int:
        """Which epoch runs, or comes next if none does."""
        return self._epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all data ranks in one whole step, where that is fixed."""
        size = self.loader.batch_size
        if size is None:
            return None
        return size if self._source.split else size * self.places.num_data_ranks

    @property
    def is_placeholder(self) -> bool:
        """Whether the last batch given was none of this rank's, but there to keep it in step."""
        return self.turn.sizes[self.places.data_rank] == 0 and self.turn.num_samples > 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; it decides the order of shuffled samples."""
        self._epoch, self._begun = epoch, False
        if self._pending is not None and self._pending["epoch"] != epoch:
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: after the batch that was given last, or at the start of an epoch."""
        if self._pending is not None:
            return dict(self._pending)
        return {"epoch": self._epoch, **self._at, **self._source.state_dict(self._begun)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next loop begin where `state_dict` was taken, in the same epoch.

        The number of data ranks and the batch size may be others: samples are counted.
        """
        self._pending = dict(state)
        self._epoch, self._begun = state["epoch"], False
        self._at = {name: state[name] for name in self._at}
        self._source.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        return self.steps()

    def steps(self, skip: int | None = None) -> Iterator[Any]:
        """The batches of one epoch.

        Args:
            skip: Leave out the first steps; None: those before the state that was loaded.

        Raises:
            RankError: The ranks do not read the same.

        Comm:
            One control message on each axis before the first batch, which compares it.
        """
        if self._begun:
            self._epoch += 1
        position = self._pending if self._pending is not None and skip is None else {}
        self._pending, self._begun = None, True
        self._at = {name: position.get(name, 0) for name in self._at}
        self._source.begin(self._epoch)
        given = self._source.batches(self._at, skip or 0)
        self._running.begin(self)
        try:
            for number, ((batch, turn), is_last) in enumerate(_with_last(given)):
                if number == 0:
                    compare_first(self.places, self._epoch, turn, batch)
                self.turn, self.is_last = turn, is_last
                self._at = {
                    "samples": turn.before + turn.num_samples,
                    "batches": turn.batches + self._source.batches_per_step,
                    "steps": turn.steps + 1,
                }
                batch = self._place(batch)
                if self.is_placeholder:
                    batch = contents.without_labels(batch)
                yield batch
        except Exception as error:  # of the data set, on this rank alone; the others would wait
            comm.announce_failure(None, error)
            raise
        else:
            self._epoch, self._begun = self._epoch + 1, False
            self._at = dict.fromkeys(self._at, 0)
        finally:
            self._running.end(self)


class SkippedLoader:
    """A loader without its first steps; made by `skip_first_batches`."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.loader, self.num_batches = loader, num_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(len(self.loader) - self.num_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, DataRankLoader):
            return self.loader.steps(self.num_batches)
        return islice(iter(self.loader), self.num_batches, None)


def skip_first_batches(loader: Any, num_batches: int = 0) -> SkippedLoader:
    """The same loader from a later step on.

    Args:
        loader: One that `data_loader` made, whose epochs go on; or any other.
        num_batches: Steps to leave out, in every loop over the result. They are not read where the
            data set can be indexed.
    """
    return SkippedLoader(loader, num_batches)


def data_loader(
    loader: "DataLoader[Any]",
    places: Places,
    *,
    seed: int | None = None,
    split_batches: bool = False,
    sharded: bool = False,
    device: torch.device | None = None,
    non_blocking: bool = False,
    running: Running | None = None,
) -> DataRankLoader:
    """Let each data rank read its own samples, and all ranks of a tensor-parallel group the same.

    Args:
        loader: With the same data set and settings on all ranks. A shuffling sampler without a
            generator of its own gets one that depends on the seed and the epoch alone.
        places: From `places_for` or `places_on`.
        seed: Of the order of shuffled samples and of the workers; None: the first rank's
            `torch.initial_seed()`.
        split_batches: The batch size is that of all data ranks together, not of each.
        sharded: The data set gives each data rank its own samples already (iterable ones only).
        device: Where to put the tensors; None leaves them.
        non_blocking: Do not wait for the copies, which needs pinned memory.
        running: Where it notes that it is iterated.

    Where ranks share sequences each gets its own tokens of the batches, as `split_batch` has it.

    Returns:
        The loader. It also has `set_epoch`, `state_dict`, `load_state_dict`.

    Raises:
        LayoutError: The sampler deals out samples itself, for other ranks than there are.

    Comm:
        One control message on each axis, for the seed. With `sharded` one more for each batch.
    """
    agreed = places.exchange(torch.initial_seed() if seed is None else int(seed))[0]
    iterable = isinstance(loader.dataset, IterableDataset)
    mine = loader.sampler if iterable else sources.checked_sampler(loader, places)
    source: sources.Source
    if sharded or sources.is_sharding(mine):
        source = sources.ShardedSource(loader, places, agreed)
    elif iterable or type(loader) is not DataLoader:
        source = sources.WholeSource(loader, places, agreed, split_batches)
    else:
        source = sources.IndexedSource(loader, places, agreed, split_batches)

    axes, rules = places.sequences, rules_of(places)

    def place(batch: Any) -> Any:
        batch = batch if device is None else contents.to_device(batch, device, non_blocking)
        return batch if axes is None else split_batch(batch, axes, rules)

    return DataRankLoader(loader, source, places, place, running)


def _with_last(given: Batches) -> Iterator[tuple[tuple[Any, Turn], bool]]:
    """Each item, and whether it is the last one; reads one ahead where its turn does not say it."""
    first = next(given, None)
    if first is None:
        return
    items = chain([first], given)
    if first[1].is_last is None:
        yield from with_last(items)
    else:
        yield from ((item, bool(item[1].is_last)) for item in items)
