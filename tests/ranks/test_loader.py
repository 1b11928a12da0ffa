"""Each data rank gets its own samples, in the order of one process; all take every step."""

import itertools
import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import plait
import plait.comm
from plait.errors import LayoutError, RankError
from plait.layout import ParallelismConfig
from plait.run import World
from plait.testing import mutation
from plait.train import Places, data_loader, places_for, skip_first_batches, turns
from plait.train.loader import DataRankLoader


@dataclass(frozen=True)
class Alone(Places):
    """A data rank of several, for what needs no word with the others."""

    rank: int = 0
    num_ranks: int = 1

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks


def on(rank: int, num_ranks: int) -> Alone:
    return Alone(World(), torch.device("cpu"), ParallelismConfig(), rank=rank, num_ranks=num_ranks)


class Stream(IterableDataset[Any]):
    """Numbers one after another; in workers every worker its share."""

    def __init__(self, count: int, first: int = 0, step: int = 1) -> None:
        self.numbers = range(first, count, step)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        share = slice(None) if worker is None else slice(worker.id, None, worker.num_workers)
        yield from self.numbers[share]


def own(loader: DataRankLoader, epochs: int = 1) -> list[list[int]]:
    """The samples of each step of this rank; none for a placeholder."""
    found = []
    for _ in range(epochs):
        for batch in loader:
            batch = batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
            found.append([] if loader.is_placeholder else batch)
    return found


def together(make: Any, num_ranks: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The samples of all ranks in each step, rank by rank."""
    each = [
        own(data_loader(make(), on(rank, num_ranks), seed=3, **options), epochs)
        for rank in range(num_ranks)
    ]
    assert len({len(steps) for steps in each}) == 1, "the ranks take unequal numbers of steps"
    return [[x for part in step for x in part] for step in zip(*each, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(
    count: int, num_ranks: int, shuffle: bool
) -> None:
    data = list(range(count))
    for size in (1, 2, 3):
        expected = together(lambda: DataLoader(data, size * num_ranks, shuffle=shuffle), 1, 2)  # noqa: B023
        found = together(lambda: DataLoader(data, size, shuffle=shuffle), num_ranks, 2)  # noqa: B023
        assert found == expected
        split = together(
            lambda: DataLoader(data, size * num_ranks, shuffle=shuffle),  # noqa: B023
            num_ranks,
            2,
            split_batches=True,
        )
        assert split == expected
        half = len(expected) // 2
        assert sorted(itertools.chain(*expected[:half])) == data, "every sample once"
        if shuffle and count > 8:
            assert expected[:half] != expected[half:], "another order in each epoch"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_stream_is_read_in_turns(num_ranks: int) -> None:
    for count, size in itertools.product((1, 5, 12), (1, 2)):
        whole = list(DataLoader(Stream(count), size * num_ranks))
        expected = [batch.tolist() for batch in whole]
        assert together(lambda: DataLoader(Stream(count), size), num_ranks) == expected  # noqa: B023
        split = together(
            lambda: DataLoader(Stream(count), size * num_ranks),  # noqa: B023
            num_ranks,
            split_batches=True,
        )
        assert split == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_left_over_can_be_dropped(num_ranks: int) -> None:
    for make in (
        lambda: DataLoader(list(range(11)), 2, drop_last=True),
        lambda: DataLoader(Stream(11), 2, drop_last=True),
    ):
        steps = together(make, num_ranks)
        assert list(itertools.chain(*steps)) == list(range(10 if num_ranks == 1 else 8))
        assert len(data_loader(DataLoader(range(11), 2, drop_last=True), on(0, num_ranks))) == len(
            steps
        )


def test_samplers_of_the_users() -> None:
    data = list(range(10))
    uneven = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [1]]
    assert together(lambda: DataLoader(data, batch_sampler=uneven), 2) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
        [1],
    ]
    weights = [1.0] * 9 + [5.0]
    for make_sampler in (
        lambda: WeightedRandomSampler(weights, 12),
        lambda: RandomSampler(data),
        lambda: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
    ):
        make = lambda size: DataLoader(data, size, sampler=make_sampler())  # noqa: B023, E731
        assert together(lambda: make(2), 2, 2) == together(lambda: make(4), 1, 2)  # noqa: B023
    steps = together(
        lambda: DataLoader(
            torch.arange(10),  # type: ignore[arg-type]
            sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False),
            batch_size=None,
        ),
        2,
    )
    assert steps == [list(range(6)), list(range(6, 10))]


def test_whole_batches_of_a_data_set_of_batches() -> None:
    data = [torch.arange(2) + 2 * i for i in range(5)]
    steps = together(lambda: DataLoader(data, batch_size=None), 2)
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_workers_read_what_the_process_would() -> None:
    for make in (
        lambda workers: DataLoader(list(range(9)), 2, shuffle=True, num_workers=workers),
        lambda workers: DataLoader(Stream(9), 2, num_workers=workers),
    ):
        assert together(lambda: make(1), 2) == together(lambda: make(0), 2)  # noqa: B023


def test_length_is_the_number_of_steps() -> None:
    for count, size, num_ranks in itertools.product((1, 7, 8), (1, 2, 3), (1, 2, 3)):
        for make in (DataLoader(range(count), size), DataLoader(_Sized(count), size)):
            loader = data_loader(make, on(num_ranks - 1, num_ranks))
            assert len(loader) == len(list(loader)), (count, size, num_ranks)
            assert len(loader) == len(list(loader)), "in the second epoch too"
            assert loader.total_batch_size == size * num_ranks
            assert loader.dataset is make.dataset


class _Sized(Stream):
    def __len__(self) -> int:
        return len(self.numbers)


def labelled(count: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": torch.full((3,), i), "labels": torch.full((3,), i), "weight": torch.ones(())}
        for i in range(count)
    ]


def test_a_rank_without_samples_gets_labels_that_count_nowhere() -> None:
    loader = data_loader(DataLoader(labelled(5), 2), on(1, 2))
    given = list(loader)
    assert [batch["input_ids"][:, 0].tolist() for batch in given] == [[2, 3], [4]]
    assert given[1]["labels"].tolist() == [[-100] * 3] and loader.turn.sizes == (1, 0)
    first = list(data_loader(DataLoader(labelled(5), 2), on(0, 2)))
    assert first[1]["labels"].tolist() == [[4] * 3]


def test_batches_of_any_kind() -> None:
    from transformers import BatchEncoding

    Pair = namedtuple("Pair", "x names")

    def as_list(rows: Any) -> Any:
        return [torch.tensor(rows), ["a"] * len(rows)]

    def as_pair(rows: Any) -> Any:
        return Pair(torch.tensor(rows), tuple("a" * len(rows)))

    def as_encoding(rows: Any) -> Any:
        return BatchEncoding({"x": torch.tensor(rows), "labels": torch.tensor(rows)})

    def as_nested(rows: Any) -> Any:
        return {"x": {"y": (torch.tensor(rows),)}, "n": len(rows), "none": None}

    device = torch.device("cpu")
    for collate in (as_list, as_pair, as_encoding, as_nested):
        expected = collate([2, 3])
        for data, options in ((range(5), {}), (Stream(5), {})):
            loader = DataLoader(data, 2, collate_fn=collate)
            given = list(data_loader(loader, on(1, 2), device=device, **options))
            assert type(given[0]) is type(expected) and str(given[0]) == str(expected)
        halves = data_loader(
            DataLoader(Stream(4), 4, collate_fn=collate), on(1, 2), split_batches=True
        )
        assert str(next(iter(halves))).replace("4", "2") == str(expected).replace("4", "2")


def test_an_epoch_that_is_broken_off_is_over() -> None:
    make = lambda: DataLoader(list(range(30)), 2, shuffle=True)  # noqa: E731
    first, second = (own(data_loader(make(), on(0, 2), seed=1), 2) for _ in range(2))
    assert first == second
    loader = data_loader(make(), on(0, 2), seed=1)
    for _ in loader:
        break
    assert loader.epoch == 0
    assert own(loader) == first[8:], "the second epoch"
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert own(loader) == first[:8]
    torch.manual_seed(77)
    assert own(data_loader(make(), on(0, 2), seed=1)) == first[:8], "whatever the process's seed"
    assert own(data_loader(make(), on(0, 2), seed=2)) != first[:8]


LOADERS = {
    "indices": lambda size: DataLoader(list(range(23)), size, shuffle=True),
    "generator": lambda size: DataLoader(
        list(range(23)),
        size,
        sampler=RandomSampler(range(23), generator=torch.Generator().manual_seed(4)),
    ),
    "stream": lambda size: DataLoader(Stream(23), size),
    "workers": lambda size: DataLoader(list(range(23)), size, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_resume_in_the_middle_of_an_epoch(name: str) -> None:
    make = LOADERS[name]
    expected = own(data_loader(make(2), on(1, 2), seed=3), 3)
    per_epoch = len(expected) // 3
    for epoch, stop in ((0, 2), (1, 0), (1, 3), (1, per_epoch - 1)):
        loader = data_loader(make(2), on(1, 2), seed=3)
        for _ in range(epoch):
            own(loader)
        steps = iter(loader)
        for _ in range(stop):
            next(steps)
        state = loader.state_dict()
        fresh = data_loader(make(2), on(1, 2), seed=99)
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state or name == "generator"
        assert own(fresh, 3 - epoch) == expected[epoch * per_epoch + stop :], (epoch, stop)


def test_a_state_after_the_last_batch_is_the_end_of_that_epoch() -> None:
    loader = data_loader(LOADERS["indices"](2), on(0, 2), seed=3)
    for _ in loader:
        state = loader.state_dict()
    fresh = data_loader(LOADERS["indices"](2), on(0, 2), seed=3)
    fresh.load_state_dict(state)
    assert own(fresh) == [] and fresh.epoch == 1
    assert own(fresh) == own(loader)


@pytest.mark.parametrize("name", ["indices", "generator"])
def test_resume_on_another_number_of_ranks(name: str) -> None:
    make = LOADERS[name]
    expected = list(itertools.chain(*together(lambda: make(2), 2)))
    loader = data_loader(make(2), on(0, 2), seed=3)
    steps = iter(loader)
    for _ in range(2):
        next(steps)
    state = loader.state_dict()
    for num_ranks, size in ((1, 4), (3, 2), (2, 3)):
        rest = []
        for rank in range(num_ranks):
            fresh = data_loader(make(size), on(rank, num_ranks), seed=3)
            fresh.load_state_dict(state)
            rest.append(own(fresh))
        found = [x for step in zip(*rest, strict=True) for part in step for x in part]
        assert found == expected[8:], (num_ranks, size)


@pytest.mark.parametrize("name", LOADERS)
def test_skipping_the_first_batches(name: str) -> None:
    make = LOADERS[name]
    expected = own(data_loader(make(2), on(1, 2), seed=3), 2)
    loader = data_loader(make(2), on(1, 2), seed=3)
    short = skip_first_batches(loader, 2)
    per_epoch = len(expected) // 2
    given = [[] if loader.is_placeholder else x.tolist() for x in short]
    assert given == expected[2:per_epoch]
    assert own(loader) == expected[per_epoch:], "its epochs go on"
    if name == "indices":
        assert len(short) == per_epoch - 2
    plain = DataLoader(list(range(7)), 2)
    assert [x.tolist() for x in skip_first_batches(plain, 2)] == [[4, 5], [6]]


def test_the_order_test_notices() -> None:
    args = (13, 2, True)
    test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(*args)
    with mutation.must_fail(turns, "dealt", lambda b, n, split, drop: ([x] * n for x in b)):
        test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(*args)
    for method in ("skipping",):
        with mutation.must_fail(turns, method, lambda batches, num_samples: iter(batches)):
            test_resume_on_another_number_of_ranks("indices")


# -- with other ranks ------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
def test_ranks_of_a_group_read_the_same(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    tp = plait.DistributedConfig(tp_size=2, dp_shard_size=world_size // 2)
    places = places_for(tp)
    loader = data_loader(DataLoader(list(range(9)), 2, shuffle=True), places)
    grid = places.exchange_grid(own(loader, 2))
    assert grid[0] == grid[1], "both ranks of each group"
    assert len(grid[0]) == world_size // 2
    if world_size == 4:
        assert grid[0][0] != grid[0][1]
    assert places.exchange(rank) == list(range(world_size))


class Shifting(torch.utils.data.Dataset[Any]):
    """A data set that gives each rank something else, from the first sample on or later."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([index, torch.distributed.get_rank()])}

    def __len__(self) -> int:
        return 6


@pytest.mark.ranks(2)
def test_ranks_of_a_group_that_read_other_things_are_told(rank: int) -> None:
    places = places_for(plait.DistributedConfig(tp_size=2))
    with pytest.raises(RankError) as caught:
        list(data_loader(DataLoader(Shifting(), 2), places))
    text = str(caught.value)
    assert "batch.x differs" in text and "rank 0: int64 (2, 2)" in text and "rank 1:" in text
    for data in (range(5 + rank * 2), Stream(5 + rank)):
        with pytest.raises(RankError, match="differs between ranks"):
            list(data_loader(DataLoader(data, 5 + rank), places))
    # The ranks are in step afterwards.
    assert len(own(data_loader(DataLoader(range(5), 2), places))) == 3


class RankOrder(Sampler[int]):
    """An order that each process draws by itself."""

    def __init__(self, rank: int) -> None:
        self.draw = random.Random(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw.sample(range(8), 8))

    def __len__(self) -> int:
        return 8


@pytest.mark.ranks(2)
def test_data_ranks_with_orders_of_their_own_are_told(rank: int) -> None:
    places = places_for()
    with pytest.raises(RankError, match="the order of the samples differs"):
        list(data_loader(DataLoader(range(8), 2, sampler=RankOrder(rank)), places))
    loader = data_loader(DataLoader(range(8), 2), places)
    loader.set_epoch(rank)
    with pytest.raises(RankError, match="the epoch differs"):
        list(loader)
    shared = RandomSampler(range(8), generator=torch.Generator().manual_seed(rank))
    orders = places.exchange(own(data_loader(DataLoader(range(8), 1, sampler=shared), places)))
    assert sorted(itertools.chain(*orders[0], *orders[1])) == list(range(8))


@pytest.mark.ranks(2)
def test_a_sampler_that_deals_out_by_itself(rank: int) -> None:
    data = list(range(8))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    loader = data_loader(DataLoader(data, 2, sampler=sampler), places_for())
    assert own(loader) == [[rank, 2 + rank], [4 + rank, 6 + rank]]
    tp = places_for(plait.DistributedConfig(tp_size=2))
    with pytest.raises(LayoutError, match="of 2, but this is data rank 0 of 1"):
        data_loader(DataLoader(data, 2, sampler=sampler), tp)


@pytest.mark.ranks(2)
def test_shards_of_unequal_length_end_together(rank: int) -> None:
    places = places_for()
    loader = DataLoader(Stream(5 + rank * 5, first=rank * 5), 2)
    sharded = data_loader(loader, places, sharded=True)
    expected = [[0, 1], [2, 3], [4]] if rank == 0 else [[5, 6], [7, 8], [9]]
    assert own(sharded) == expected
    longer = DataLoader(Stream(3 + rank * 8, first=rank * 5), 2)
    sharded = data_loader(longer, places, sharded=True)
    expected = [[0, 1], [2], []] if rank == 0 else [[5, 6], [7, 8], [9, 10]]
    assert own(sharded) == expected
    sharded.set_epoch(7)
    steps = iter(sharded)
    next(steps)
    state = sharded.state_dict()
    fresh = data_loader(longer, places, sharded=True)
    fresh.load_state_dict(state)
    assert own(fresh) == expected[1:] and fresh.epoch == 8
    with pytest.raises(RankError, match="data rank 0 has none at all"):
        list(data_loader(DataLoader(Stream(rank * 3), 2), places, sharded=True))


class Failing(Shifting):
    """A data set of which one rank cannot read a sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 3 and torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        return index


@pytest.mark.ranks(2)
def test_a_sample_that_one_rank_cannot_read_ends_all_ranks(rank: int) -> None:
    places = places_for(plait.DistributedConfig(tp_size=2))
    x = torch.ones(1)
    with pytest.raises(OSError if rank == 1 else RankError, match="the disk is gone"):
        for _ in data_loader(DataLoader(Failing(), 1), places):
            plait.comm.all_reduce(x, places.tp_mesh)
    assert plait.comm.all_reduce(x, places.tp_mesh).item() == 2, "they go on together"
