"""Filling a module from a checkpoint: every rank reads what it owns, and all learn the outcome."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from plait.errors import WeightsError
from plait.plan.intervals import ParamLayout
from plait.weights.checkpoint import Checkpoint
from plait.weights.outcome import agree, settle, together
from plait.weights.recipes import Recipe
from plait.weights.regions import Region, along, shape_in
from plait.weights.sharded import fsdp_shards, spans_of
from plait.weights.slots import Slot, layout_of_slot, slots_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
DtypeOf = Callable[[str, torch.dtype], torch.dtype]

_SETTLE_BYTES = 2 << 30  # of whole tensors: about a second of reading between two exchanges


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Args:
        bytes_read: Bytes of the file's slices that this rank owns and read.
        total_bytes: Bytes of the whole checkpoint.
        num_files: Its number of files.
        seconds: Wall time.
        loaded: Names of the parameters and buffers that were filled.
        missing: Persistent names of the module that no recipe makes and that are still on meta.
        not_stored: Non-persistent buffers on meta (a rotary table): the caller computes them.
        unexpected: Checkpoint tensors that no recipe uses.
    """

    bytes_read: int
    total_bytes: int
    num_files: int
    seconds: float
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    not_stored: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for a log."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return (
            f"read {human_bytes(self.bytes_read)} of {human_bytes(self.total_bytes)} in "
            f"{self.seconds:.1f} s from {files}; "
            f"{_some('missing', self.missing)}, {_some('unexpected', self.unexpected)}"
        )


def _some(what: str, names: tuple[str, ...]) -> str:
    """How many names there are, and the first of them."""
    if not names:
        return f"0 {what}"
    return f"{len(names)} {what} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})"


def human_bytes(count: int) -> str:
    """Returns a byte count for people, in decimal units: `270 MB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size} {unit}"
            )
    return f"{count} B"


def mismatches(
    module: nn.Module,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    layouts: Mapping[str, ParamLayout] | None = None,
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the targets whose shape in the checkpoint is not that of the module.

    Args:
        module: The module to be filled.
        checkpoint: The checkpoint.
        recipes: How each target is made.
        layouts: How each target lies on the ranks, where not as its DTensor says.

    Returns:
        For each such target the shape in the checkpoint and the shape in the module.
    """
    slots = slots_of(module)
    found = {}
    for name, recipe in recipes.items():
        if name in slots:
            have = recipe.shape(checkpoint)
            want = layout_of_slot(name, slots[name], layouts or {}).shape
            if have != want:
                found[name] = (have, want)
    return found


def load(  # noqa: PLR0913
    module: nn.Module,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    layouts: Mapping[str, ParamLayout] | None = None,
    *,
    mesh: "DeviceMesh | None" = None,
    rank: int | None = None,
    dtype_of: DtypeOf | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills the parameters and buffers of a module, in place, with this rank's slices.

    A parameter on meta becomes real; a DTensor on meta becomes a DTensor of the same spec around
    the local tensor; one that is real already is overwritten in its own storage where dtype and
    device allow. Tied parameters stay tied.

    Args:
        module: The module; its parameters may be on meta.
        checkpoint: Where to read from.
        recipes: How each parameter or buffer is made, by its name in the module.
        layouts: How each target lies on the ranks; without an entry: as its DTensor is placed, or
            whole on every rank.
        mesh: The axis whose ranks load together; None for one process.
        rank: This rank's place in the layouts; its place on `mesh` by default.
        dtype_of: The dtype of a target, from its name and the dtype in the file; the dtype it has
            in the module by default.
        device: Where the tensors go; by default the device of the slot, CPU for one on meta.
        progress: Called with the bytes read so far and in all, of this rank.

    Raises:
        WeightsError: A target is not in the module, a shape differs, pieces do not tile a tensor,
            a file ends early. On all ranks, before anything is read wherever it can be known.
        RankError: Another rank failed; it is named.

    Comm:
        Three exchanges of control messages, and one more per 2 GiB of weights.
    """
    begin = time.perf_counter()
    asked = f"Load {len(recipes)} tensors from {checkpoint.files.origin}."
    if rank is None:
        rank = 0 if mesh is None else mesh.get_local_rank()
    slots = slots_of(module)
    jobs = together(mesh, asked, lambda: _jobs(asked, slots, checkpoint, recipes, layouts or {}))
    agree(mesh, asked, _digest(jobs))
    before = checkpoint.bytes_read
    total = sum(_file_bytes(job, rank) for job in jobs)
    failure: Exception | None = None
    for job, pause in _with_pauses(jobs):
        try:
            if failure is None:
                _read(job, checkpoint, rank, dtype_of, device)
        except Exception as error:
            failure = error
        if pause:
            settle(mesh, asked, failure)
        if progress is not None and failure is None:
            progress(min(checkpoint.bytes_read - before, total), total)
    settle(mesh, asked, failure)
    return _report(module, checkpoint, recipes, checkpoint.bytes_read - before, begin)


@dataclass(frozen=True)
class _Job:
    """One target to be read."""

    name: str
    slot: Slot
    recipe: Recipe
    layout: ParamLayout
    file_dtype: torch.dtype


def _jobs(
    asked: str,
    slots: Mapping[str, Slot],
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    layouts: Mapping[str, ParamLayout],
) -> list[_Job]:
    problems, jobs, filled = [], [], set()
    for name, recipe in recipes.items():
        absent = [key for key in recipe.names() if key not in checkpoint]
        if name not in slots:
            problems.append(f"the module has no parameter or buffer {name}")
        elif absent:
            problems.append(f"{name} is made of {', '.join(absent[:3])}, absent in the checkpoint")
        else:
            layout = layout_of_slot(name, slots[name], layouts)
            shape = recipe.shape(checkpoint)
            if shape != layout.shape:
                problems.append(f"{name}: {shape} in the checkpoint, {layout.shape} in the module")
            problems += [f"{name}: {problem}" for problem in layout.problems()]
            if id(slots[name].tensor) in filled:
                continue  # tied: the same tensor under a second name
            filled.add(id(slots[name].tensor))
            jobs.append(_Job(name, slots[name], recipe, layout, recipe.dtype(checkpoint)))
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        raise WeightsError(asked, problems[:12] + more)
    return jobs


def _digest(jobs: list[_Job]) -> str:
    text = "\n".join(f"{job.name} {job.layout} {job.file_dtype}" for job in jobs)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_pauses(jobs: list[_Job]) -> Iterator[tuple[_Job, bool]]:
    """The jobs, and whether the ranks exchange how they fare after it: at the same ones on all."""
    unsettled = 0
    for job in jobs:
        unsettled += math.prod(job.layout.shape) * job.file_dtype.itemsize
        pause = unsettled >= _SETTLE_BYTES
        unsettled = 0 if pause else unsettled
        yield job, pause


def _read(
    job: _Job,
    checkpoint: Checkpoint,
    rank: int,
    dtype_of: DtypeOf | None,
    device: torch.device | str | None,
) -> None:
    slot, layout = job.slot, job.layout
    local = slot.local
    dtype = slot.tensor.dtype if dtype_of is None else dtype_of(job.name, job.file_dtype)
    place = torch.device(device or ("cpu" if slot.on_meta else local.device))
    region = _region(job, rank)
    shape = shape_in(layout.shape, region)
    if tuple(local.shape) != shape:
        raise WeightsError(
            f"Load {job.name} on rank {rank}.",
            f"its layout gives this rank {shape}, but its local tensor has {tuple(local.shape)}",
        )
    if slot.on_meta and place.type == "cpu" and dtype == job.file_dtype:
        mapped = job.recipe.view(checkpoint, region)
        if mapped is not None and fsdp_shards(slot.tensor) is not None:
            mapped = mapped.contiguous()  # FSDP sends it as it lies in memory
        if mapped is not None:
            slot.fill(mapped)
            return
    in_place = not slot.on_meta and local.dtype == dtype and local.device == place
    out = local if in_place else torch.empty(shape, dtype=dtype, device=place)
    with torch.no_grad():
        job.recipe.read_into(checkpoint, region, out)
    if not in_place:
        slot.fill(out)


def _region(job: _Job, rank: int) -> Region:
    """What a rank holds of a target: as the layout says, and of that what FSDP leaves to it."""
    layout = job.layout
    if fsdp_shards(job.slot.tensor) is None:
        return along(len(layout.shape), layout.dim, layout.pieces_of(rank))
    spans = zip(spans_of(job.slot.tensor, layout), layout.shape, strict=True)
    return tuple(None if span == ((0, size),) else span for span, size in spans)


def _file_bytes(job: _Job, rank: int) -> int:
    return math.prod(shape_in(job.layout.shape, _region(job, rank))) * job.file_dtype.itemsize


def _report(
    module: nn.Module,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    bytes_read: int,
    begin: float,
) -> LoadReport:
    used = {key for recipe in recipes.values() for key in recipe.names()}
    empty = {name: slot for name, slot in slots_of(module).items() if slot.on_meta}
    report = LoadReport(
        bytes_read,
        checkpoint.total_bytes,
        len(checkpoint.files.files),
        time.perf_counter() - begin,
        tuple(recipes),
        tuple(name for name, slot in empty.items() if slot.persistent),
        tuple(name for name, slot in empty.items() if not slot.persistent),
        tuple(key for key in checkpoint.keys() if key not in used),  # noqa: SIM118
    )
    log.debug("%s", report)
    return report
