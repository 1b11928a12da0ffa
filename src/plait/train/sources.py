"""Where a data rank's batches come from: by index, by taking turns, or from its own shard."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from plait import comm
from plait.errors import LayoutError, RankError
from plait.train import batches as contents
from plait.train.places import Places
from plait.train.turns import Turn, TurnSampler, part_sizes

_SEEDED = "_plait_seeded"


class Source(ABC):
    """The batches of one data rank, epoch by epoch, and what the others get meanwhile."""

    batches_per_step = 1

    def __init__(
        self, loader: "DataLoader[Any]", places: Places, seed: int, split: bool = False
    ) -> None:
        self.loader, self.places, self.seed, self.split = loader, places, seed, split
        self.shuffle = _Shuffle(loader, places)

    @abstractmethod
    def __len__(self) -> int:
        """Number of steps of an epoch."""

    @abstractmethod
    def batches(self, start: Mapping[str, int], skip: int) -> Iterator[tuple[Any, Turn]]:
        """The batches of an epoch from a position on.

        Args:
            start: Samples, batches and steps that have been read.
            skip: Steps to leave out after that.
        """

    def begin(self, epoch: int) -> None:
        """Set the order of an epoch."""
        self.shuffle.begin(_mixed(self.seed, epoch))
        for part in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def state_dict(self, begun: bool) -> dict[str, Any]:
        """What decides the order of the epoch that has begun, or else of the next one."""
        return {"seed": self.seed, "generator": self.shuffle.state(begun)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the order of another run for the epoch that comes next."""
        self.seed, self.shuffle.start_from = state["seed"], state["generator"]


class IndexedSource(Source):
    """A data set with indices: each rank reads only what is its own."""

    def __init__(
        self, loader: "DataLoader[Any]", places: Places, seed: int, split: bool = False
    ) -> None:
        super().__init__(loader, places, seed, split)
        own = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self.sampler = TurnSampler(
            own,
            places.data_rank,
            places.num_data_ranks,
            split=split,
            drop_last=bool(getattr(own, "drop_last", False)),
            single=loader.batch_sampler is None,
        )
        self._workers = torch.Generator()
        self._inner = _same_with(loader, self.sampler, self._workers)

    def __len__(self) -> int:
        return len(self.sampler)

    def begin(self, epoch: int) -> None:
        """Set the order of an epoch, and the seed of the workers."""
        super().begin(epoch)
        self._workers.manual_seed(_mixed(self.seed, epoch, self.places.data_rank + 1))

    def batches(self, start: Mapping[str, int], skip: int) -> Iterator[tuple[Any, Turn]]:
        """Those that the sampler gives this rank."""
        self.sampler.skip_samples, self.sampler.skip_steps = start["samples"], skip
        for batch in self._inner:
            yield batch, self.sampler.turns.popleft()


class WholeSource(Source):
    """A stream: every rank reads all of it, and keeps the batches whose turn is its own."""

    def __init__(
        self, loader: "DataLoader[Any]", places: Places, seed: int, split: bool = False
    ) -> None:
        super().__init__(loader, places, seed, split)
        self.batches_per_step = 1 if split else places.num_data_ranks

    def __len__(self) -> int:
        count, per_step = len(self.loader), self.batches_per_step
        return count // per_step if self.loader.drop_last else -(-count // per_step)

    def begin(self, epoch: int) -> None:
        """Set the order of an epoch, and the seed of the workers."""
        super().begin(epoch)
        self.loader.generator = torch.Generator().manual_seed(_mixed(self.seed, epoch, 1))

    def batches(self, start: Mapping[str, int], skip: int) -> Iterator[tuple[Any, Turn]]:
        """Every batch is read; other ranks' are thrown away."""
        num_ranks, rank = self.places.num_data_ranks, self.places.data_rank
        samples, step = start["samples"], start["steps"]
        first_batch = start["batches"] + skip * self.batches_per_step
        for group, read in _groups(islice(self.loader, first_batch, None), self.batches_per_step):
            first, sizes = group[0], [contents.num_samples(batch) for batch in group]
            if self.split:
                sizes = part_sizes(sizes[0], num_ranks)
                own = contents.rows(first, sum(sizes[:rank]), sum(sizes[: rank + 1]))
                own = own if sizes[rank] else contents.rows(first, 0, sizes[0])
            else:
                own = group[rank] if rank < len(group) else first
                sizes += [0] * (num_ranks - len(group))
            if 0 in sizes and self.loader.drop_last and not self.split:
                return
            token = _words(first)
            yield own, Turn(tuple(sizes), samples, first_batch + read, step + skip, token)
            samples, step = samples + sum(sizes), step + 1


class ShardedSource(Source):
    """A data set that gives each data rank its own: the ranks tell each other when one ends."""

    def __len__(self) -> int:
        return len(self.loader)

    def begin(self, epoch: int) -> None:
        """Set the order of an epoch, and the seed of the workers."""
        super().begin(epoch)
        order = _mixed(self.seed, epoch, self.places.data_rank + 1)
        self.loader.generator = torch.Generator().manual_seed(order)

    def batches(self, start: Mapping[str, int], skip: int) -> Iterator[tuple[Any, Turn]]:
        """This rank's own; asks before each whether any rank has one."""
        samples, step = start["samples"], start["steps"] + skip
        own = islice(self.loader, step, None)
        kept: Any = None
        while True:
            batch = next(own, None)
            size = 0 if batch is None else contents.num_samples(batch)
            told = [(size, kept is not None)]
            if self.places.data_mesh is not None:
                told = comm.exchange(told[0], self.places.data_mesh)
            sizes = tuple(size for size, _ in told)
            if not any(sizes):
                return
            kept = batch if batch is not None else kept
            if kept is None or any(size == 0 and not has for size, has in told):
                without = [rank for rank, (size, has) in enumerate(told) if not size and not has]
                error = RankError(
                    "A loader whose data set gives each data rank its own samples:",
                    f"data rank {', '.join(map(str, without))} has none at all",
                    "give every data rank at least one sample",
                )
                raise comm.mark_announced(error)  # all of them raise it
            yield kept, Turn(sizes, samples, step, step)
            samples, step = samples + sum(sizes), step + 1


def is_sharding(sampler: Any) -> bool:
    """Whether a sampler deals out samples to ranks by itself."""
    return isinstance(sampler, DistributedSampler)


def checked_sampler(loader: "DataLoader[Any]", places: Places) -> Any:
    """The loader's sampler.

    Raises:
        LayoutError: It deals out samples for other ranks than there are.
    """
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if is_sharding(sampler):
        there = (places.num_data_ranks, places.data_rank)
        if (sampler.num_replicas, sampler.rank) != there:
            raise LayoutError(
                f"A loader with a DistributedSampler on {places.layout}:",
                f"it reads as rank {sampler.rank} of {sampler.num_replicas}, but this is data rank "
                f"{there[1]} of {there[0]}",
                [
                    "leave the sampler out: samples are dealt out by themselves",
                    f"DistributedSampler(…, num_replicas={there[0]}, rank={there[1]})",
                ],
            )
    return sampler


class _Shuffle:
    """The generator of a shuffling sampler, the same on all ranks."""

    def __init__(self, loader: "DataLoader[Any]", places: Places) -> None:
        candidates: tuple[Any, ...] = (
            loader.sampler,
            loader.batch_sampler,
            getattr(loader.batch_sampler, "sampler", None),
        )
        self.sampler: Any = next((x for x in candidates if hasattr(x, "generator")), None)
        self.places = places
        self._started: torch.Tensor | None = None
        self.start_from: torch.Tensor | None = None
        if self.sampler is not None and self.sampler.generator is None:
            self.sampler.__dict__[_SEEDED] = True

    def begin(self, seed: int) -> None:
        """Set it for an epoch: from the seed, or the user's own as the first rank has it.

        Comm: one control message on each axis, for a generator of the user's.
        """
        if self.sampler is None:
            return
        if _SEEDED in self.sampler.__dict__:
            self.sampler.generator = torch.Generator().manual_seed(seed)
            return
        if self.start_from is not None:
            self.sampler.generator.set_state(self.start_from)
        self._started = self.places.exchange(self.sampler.generator.get_state())[0]
        self.sampler.generator.set_state(self._started)
        self.start_from = None

    def state(self, begun: bool) -> torch.Tensor | None:
        """The user's generator at the start of the epoch that has begun, or of the next one."""
        if self.sampler is None or _SEEDED in self.sampler.__dict__:
            return None
        return self._started if begun else self.sampler.generator.get_state()


def _mixed(seed: int, epoch: int, rank: int = 0) -> int:
    """One seed of several numbers; close ones give distant seeds."""
    words = f"{seed} {epoch} {rank}".encode()
    return zlib.crc32(words) | zlib.crc32(words[::-1]) << 31


def _same_with(
    loader: "DataLoader[Any]", sampler: TurnSampler, generator: torch.Generator
) -> "DataLoader[Any]":
    """A loader like another one that reads what `sampler` says."""
    given: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
            "persistent_workers",
        )
    }
    if sampler.single:
        given |= {"batch_size": None, "sampler": sampler}
    else:
        given["batch_sampler"] = sampler
    return DataLoader(loader.dataset, generator=generator, **given)


def _groups(given: Iterator[Any], size: int) -> Iterator[tuple[list[Any], int]]:
    """Lists of `size` items, the last one shorter; and how many items came before."""
    read = 0
    while group := list(islice(given, size)):
        yield group, read
        read += len(group)


def _words(batch: Any) -> str:
    """Shapes and a few values of a batch, to be compared between ranks."""
    from plait.consistency import fingerprints

    return repr(fingerprints.of_call((batch,), {}))
