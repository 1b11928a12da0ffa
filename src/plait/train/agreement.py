"""Do the ranks read the same? Compared at the first batch of each epoch."""

import zlib
from typing import Any

from plait import comm
from plait.consistency import fingerprints
from plait.errors import RankError
from plait.train.places import Places
from plait.train.turns import Turn


def compare_first(places: Places, epoch: int, turn: Turn, batch: Any) -> None:
    """Compare what the ranks are about to do with the first batch of an epoch.

    All ranks must be in the same epoch, at the same position, with the same samples for each data
    rank; the ranks of a tensor-parallel group must have the same batch, to the bit.

    Args:
        places: Which ranks see the same samples.
        epoch: Of this rank's loader.
        turn: Which samples every data rank gets.
        batch: What this rank has got, before it goes to its device.

    Raises:
        RankError: They differ; on all ranks.

    Comm:
        One control message on each axis.
    """
    if places.mesh is None:
        return
    step = {
        "epoch": str(epoch),
        "samples read before": str(turn.before),
        "batch sizes": str(turn.sizes),
        "order of the samples": f"checksum {zlib.crc32(turn.token.encode()):08x}",
    }
    entries = fingerprints.of_call((batch,), {})
    told = {name: f"{text} {bits}".strip() for name, (text, bits, _) in entries.items()}
    grid = places.exchange_grid((places.world.rank, step, told))
    everyone = [cell for row in grid for cell in row]
    for name in step:
        _same(f"the {name}", [(rank, found[name]) for rank, found, _ in everyone], _ORDER)
    for column in zip(*grid, strict=True):
        names = dict.fromkeys(name for _, _, found in column for name in found)
        for name in names:
            shown = name.replace("argument 0", "batch")
            _same(shown, [(rank, found.get(name, "absent")) for rank, _, found in column], _BATCH)


_ORDER = (
    "give the loader's sampler a generator, or leave shuffling to shuffle=True",
    "build the same data set, with the same batch size, on every rank",
)
_BATCH = (
    "seed the data set's random numbers alike (plait.Accelerator(seed=…))",
    "let only the loader decide what a rank reads, not the rank's number",
)


def _same(name: str, values: list[tuple[int, str]], ways_out: tuple[str, ...]) -> None:
    if len({value for _, value in values}) > 1:
        error = RankError(
            f"The first batch of an epoch: {name} differs between ranks that read together.",
            [f"rank {rank}: {value}" for rank, value in values],
            ways_out,
        )
        raise comm.mark_announced(error)  # all ranks raise it
