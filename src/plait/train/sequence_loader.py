"""A loader of whole sequences, of which each rank takes its part, whoever read them.

Two conventions are in use. *Own*: every rank reads samples of its own; the ranks that share
sequences then take one another's batches in turn, each split over all of them. *Same*: these ranks
read the same batches. Which one it is shows in the first batches, or is said.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from plait import comm
from plait.errors import PlaitError
from plait.train.batches import map_tensors, tensors_of, to_device, without_labels
from plait.train.loader import DataRankLoader
from plait.train.sequences import SplitBatch, SplitRules, axes_of, rules_of, split_batch

CONVENTIONS = ("own", "same")


class SequenceParallelLoader:
    """Batches split along the sequence, from any loader of whole ones.

    ```python
    loader = plait.SequenceParallelLoader(loader, accelerator)
    for batch in loader:
        loss = model(**batch).loss
    ```

    Every step is taken by all ranks: where some run out of batches before others, those left are
    given to all, and ranks that share none of them get a copy that counts in no loss.

    Args:
        loader: Any iterable of mappings with `input_ids` or `inputs_embeds`; one that
            `Accelerator.prepare` made splits batches already, and is used as it is.
        where: An `Accelerator`, a model that was split, or `Places`.
        convention: "own" or "same"; None: found out from the first batches.
        rules: How batches are split; None: as the layout says.
        device: Where the parts are put; None: where the batch was.

    Raises:
        LayoutError: Nobody shares sequences there.
        PlaitError: An unknown convention.

    Comm: one control message on the way of each round of batches, which carries them where the
        ranks have their own.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        where: Any,
        *,
        convention: str | None = None,
        rules: SplitRules | None = None,
        device: torch.device | None = None,
    ) -> None:
        if convention is not None and convention not in CONVENTIONS:
            raise PlaitError(
                f"SequenceParallelLoader(convention={convention!r}):",
                f"conventions are {' and '.join(CONVENTIONS)}",
                "leave it out: it is found out from the first batches",
            )
        self.loader, self.axes = loader, axes_of(where)
        self.convention = convention
        self._rules, self._device = rules or rules_of(where), device
        self._at, self._skip = {"rounds": 0, "given": 0}, {"rounds": 0, "given": 0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to what knows one: the loader, its sampler, its data set."""
        loader: Any = self.loader
        places = (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None))
        known = (getattr(part, "set_epoch", None) for part in places)
        tell = next((found for found in known if found is not None), None)
        if tell is not None:
            tell(epoch)

    def num_steps(self) -> int:
        """Number of steps of a whole epoch.

        Raises:
            TypeError: The loader has no length.

        Comm: one control message on each axis; all ranks must call it.
        """
        size = len(self.loader)  # type: ignore[arg-type]
        lengths = comm.exchange(size, self.axes.both)
        mine = max(lengths) if self.convention == "same" else sum(lengths)
        samples = self.axes.samples
        return mine if samples is None else max(comm.exchange(mine, samples))

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, after the batch that was given last; in step on all ranks."""
        return {**self._at, "convention": self.convention}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state_dict` was taken, in the same order of samples."""
        self._skip = {name: state[name] for name in self._at}
        self.convention = state["convention"] or self.convention

    def __iter__(self) -> Iterator[SplitBatch]:
        if isinstance(self.loader, DataRankLoader) and self.loader.places.sequences is not None:
            yield from self.loader
            return
        skip, self._skip = self._skip, {"rounds": 0, "given": 0}
        source = iter(self.loader)
        last, number = self._skipped(source, skip["rounds"]), skip["rounds"]
        while True:
            try:
                batches = self._round(next(source, None), number)
            except Exception as error:  # of the data, on this rank alone; the others would wait
                comm.announce_failure(None, error)
                raise
            last = batches[0] if batches else last
            steps = self._steps(len(batches))
            if not steps:
                break
            for place in range(steps):
                self._at = {"rounds": number, "given": place + 1}
                if place + 1 == steps:
                    self._at = {"rounds": number + 1, "given": 0}
                if number == skip["rounds"] and place < skip["given"]:
                    continue
                given = batches[place] if place < len(batches) else last
                if given is None:
                    raise self._nothing()
                part = self._part(given)
                yield part if place < len(batches) else without_labels(part)
            number += 1
        self._at = {"rounds": 0, "given": 0}

    def _skipped(self, source: Iterator[Any], rounds: int) -> Any:
        """The last batch of the rounds that are left out, of any of the ranks; None: there is none.

        It is what keeps ranks in step that have no other.
        """
        last = None
        for batch in islice(source, rounds):
            last = batch
        if not rounds:
            return None
        mine = None if last is None else map_tensors(lambda x: x.cpu(), last)
        return next((x for x in comm.exchange(mine, self.axes.both) if x is not None), None)

    def _nothing(self) -> PlaitError:
        """The error that there is no batch to keep in step with, which all ranks hear of."""
        error = PlaitError(
            "A loader that gives this group of ranks no batch at all:",
            "other groups have some, and this one has none to keep in step with",
            "give every rank a sample",
        )
        comm.announce_failure(None, error)
        return error

    def _part(self, batch: Any) -> SplitBatch:
        part = split_batch(batch, self.axes, self._rules)
        return part if self._device is None else to_device(part, self._device)

    def _steps(self, mine: int) -> int:
        """Steps of a round: as many as the group with most batches has."""
        samples = self.axes.samples
        return mine if samples is None else max(comm.exchange(mine, samples))

    def _round(self, batch: Any, number: int) -> list[Any]:
        """The batches that the ranks of a sequence share in this round, whoever read them."""
        told = comm.exchange(_digest(batch), self.axes.both)
        there = [x for x in told if x is not None]
        if self.convention is None and there:
            self.convention = "same" if len(set(told)) == 1 else "own"
        if self.convention == "same":
            if len(set(there)) > 1:
                raise PlaitError(
                    f"SequenceParallelLoader, batch {number}:",
                    f"the {len(told)} ranks that share sequences were given different batches, and "
                    "the same ones before, or by convention='same'",
                    (
                        "convention='own': each rank reads samples of its own",
                        "a sampler by data rank, so that ranks that share sequences read the same",
                    ),
                )
            return [batch] if len(there) == len(told) else []
        if not there:
            return []
        sent = comm.exchange(map_tensors(lambda x: x.cpu(), batch), self.axes.both)
        return [x for x in sent if x is not None]


def _digest(batch: Any) -> str | None:
    """A text that is the same for the same tensors."""
    if batch is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    for x in tensors_of(batch):
        found.update(f"{tuple(x.shape)}{x.dtype}".encode())
        found.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
