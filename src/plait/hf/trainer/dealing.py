"""Which samples each data rank gets: its part of the batch that one process would have."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from plait.errors import PlaitError

_LABELS = ("labels", "shift_labels")
_IGNORED = -100


class DealtBatches(BatchSampler):
    """Of each global batch the part of one data rank.

    A batch that does not fill all ranks, the last one of an epoch, is split into parts that differ
    by one sample at most. A rank for which none is left reads the first sample, to be ignored.

    Args:
        batches: The sampler and batch size of one data rank, in the same order on all.
        rank: This data rank.
        num_ranks: How many there are.

    Attributes:
        share: Largest number of samples that a rank gets.
    """

    def __init__(self, batches: BatchSampler, rank: int, num_ranks: int) -> None:
        self.share = batches.batch_size
        self.rank, self.num_ranks = rank, num_ranks
        super().__init__(batches.sampler, self.share * num_ranks, batches.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            sizes = part_sizes(len(batch), self.num_ranks)
            start = sum(sizes[: self.rank])
            yield batch[start : start + sizes[self.rank]] or batch[:1]

    def last_size(self, length: int) -> int:
        """Samples of this rank in the last batch of an epoch of `length` samples."""
        left = 0 if self.drop_last else length % self.batch_size
        return part_sizes(left or self.batch_size, self.num_ranks)[self.rank]


def part_sizes(size: int, num_parts: int) -> list[int]:
    """`size` in parts that differ by one at most, the larger ones first."""
    least, more = divmod(size, num_parts)
    return [least + (part < more) for part in range(num_parts)]


def dealt(loader: "DataLoader[Any]", rank: int, num_ranks: int) -> "DataLoader[Any]":
    """A loader like another one, which reads one data rank's part of each global batch.

    Raises:
        PlaitError: Its batches are made by a sampler of batches of its own.
    """
    own = loader.batch_sampler
    if type(own) is not BatchSampler:
        kind = type(own).__name__
        raise PlaitError(
            "A split model's Trainer reads batches:",
            f"their sampler is a {kind}, which decides about whole batches by itself",
            "a sampler of single samples, and per_device_train_batch_size",
        )
    given = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
            "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order",
        )
    }  # fmt: skip
    return DataLoader(loader.dataset, batch_sampler=DealtBatches(own, rank, num_ranks), **given)


def own_rows(loader: Any) -> int | None:
    """How many rows of the batch that a loader gave last are this rank's; None: all of them."""
    if loader is None or not getattr(loader, "end_of_dataloader", False):
        return None
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, DealtBatches):
        sampler = getattr(sampler, "batch_sampler", None)  # of one that skips
    return None if sampler is None else sampler.last_size(len(sampler.sampler))  # type: ignore[arg-type]


class Unlabelled(dict[str, Any]):
    """A batch of no samples of this rank's, which takes part in the step."""


def without_labels(batch: Any) -> Any:
    """The batch with every label ignored; another object than what it was given."""
    if not hasattr(batch, "keys"):
        return batch
    made = Unlabelled(batch)
    for name in _LABELS:
        if isinstance(made.get(name), torch.Tensor):
            made[name] = torch.full_like(made[name], _IGNORED)
    return made
