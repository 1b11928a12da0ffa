"""One rank's files of a checkpoint, and the first rank's commit."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from plait.checkpoint import folders, manifest
from plait.checkpoint.boxes import Box
from plait.checkpoint.files import FileRecord, HashingFiles, record, write
from plait.checkpoint.manifest import TRAINING, Chunk, Manifest, StoredTensor, rank_file
from plait.checkpoint.planners import BoxSavePlanner, metadata_of, write_chunks
from plait.checkpoint.pretrained import Pretrained
from plait.checkpoint.ranks import Place
from plait.errors import CheckpointError


@dataclass(frozen=True)
class Job:
    """What one rank has to do for a checkpoint; needs no other rank.

    Attributes:
        asked: For messages.
        place: The rank's place.
        partial: Where to write.
        final: What it becomes.
        tensors: Shape and dtype of every whole tensor of the checkpoint.
        shares: The boxes that this rank writes.
        source: From a key and a box to the tensor.
        own: The content of the rank's own file.
        training: The content of the file for all; the first rank's is written.
        tied: Other names of parameters → those stored.
        pretrained: The files of a model of transformers.
        model_class: The name of the model's class.
        keep: How many checkpoints stay.
    """

    asked: str
    place: Place
    partial: Path
    final: Path
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    shares: Mapping[str, Sequence[Box]]
    source: Callable[[str, Box], torch.Tensor]
    own: bytes
    training: bytes
    tied: Mapping[str, str]
    pretrained: Pretrained | None
    model_class: str
    keep: int | None

    def copied(self) -> "Job":
        """The same with all tensors copied to the host's memory, so that training can go on."""
        copies = {}
        for key, boxes in self.shares.items():
            for box in boxes:
                # Pinned memory is not asked for: a copy for each save would fill the host with it.
                copies[key, box] = self.source(key, box).to("cpu", copy=True).contiguous()
        return dataclasses.replace(self, source=lambda key, box: copies[key, box])


@dataclass(frozen=True)
class Report:
    """What one rank has written.

    Attributes:
        files: Its files.
        chunks: Key → where its boxes are.
    """

    files: dict[str, FileRecord]
    chunks: dict[str, list[Chunk]]


def write_part(job: Job) -> Report:
    """Writes this rank's boxes and its own file.

    Raises:
        CheckpointError: The disk does not take them.
    """
    files = HashingFiles()
    writer = FileSystemWriter(job.partial)
    writer.fs = files
    planner = BoxSavePlanner(job.tensors, job.shares, job.source)
    try:
        results = write_chunks(job.partial, planner, job.place.index, writer)
        name = rank_file(job.place.index)
        files.records[name] = write(job.partial / name, job.own)
        for name, file in files.records.items():
            nbytes = (job.partial / name).stat().st_size
            if nbytes != file.nbytes:
                raise OSError(f"{name} has {nbytes} bytes, {file.nbytes} were written")
    except (OSError, RuntimeError) as error:  # torch's archives tell of a full disk by the latter
        raise CheckpointError(
            job.asked, f"{job.partial.name} cannot be written: {error}"
        ) from error
    chunks: dict[str, list[Chunk]] = {}
    sizes = {(key, box[0]): box[1] for key, boxes in job.shares.items() for box in boxes}
    for result in results:
        key, offsets = result.index.fqn, tuple(result.index.offset or ())
        info = result.storage_data
        box = offsets, sizes[key, offsets]
        chunks.setdefault(key, []).append(Chunk(box, info.relative_path, info.offset, info.length))
    return Report(files.records, chunks)


def commit(job: Job, reports: Sequence[Report]) -> None:
    """Writes what describes the whole, and lets the checkpoint appear; one rank calls it.

    Raises:
        CheckpointError: The disk does not take it.
    """
    try:
        _commit(job, reports)
    except OSError as error:
        raise CheckpointError(
            job.asked, f"{job.partial.name} cannot be written: {error}"
        ) from error


def _commit(job: Job, reports: Sequence[Report]) -> None:
    files = {name: file for report in reports for name, file in report.files.items()}
    files[TRAINING] = write(job.partial / TRAINING, job.training)
    count = str(folders.next_count(job.final.parent)).encode()
    files[folders.ORDER] = write(job.partial / folders.ORDER, count)
    about: dict[str, Any] = {"plait": version("plait"), "torch": torch.__version__}
    about["model_class"] = job.model_class
    if job.pretrained is not None:
        files |= job.pretrained.write(job.partial)
        about["stored"] = job.pretrained.stored
    tensors = {
        key: StoredTensor(
            shape,
            dtype,
            tuple(chunk for report in reports for chunk in report.chunks.get(key, ())),
        )
        for key, (shape, dtype) in job.tensors.items()
    }
    whole = Manifest(
        step=folders.step_of(job.final),
        layout=job.place.layout,
        data_ranks=job.place.data_of,
        tensors=tensors,
        tied=job.tied,
        files=files,
        about=about,
    )
    files[".metadata"] = _write_metadata(job.partial, whole)
    problems = manifest.wrong_sizes(job.partial, whole)
    if problems:
        raise CheckpointError(job.asked, problems)
    manifest.store(job.partial, whole)
    folders.commit(job.partial, job.final)
    folders.prune(job.final.parent, job.final, job.keep)


def _write_metadata(folder: Path, whole: Manifest) -> FileRecord:
    """What torch's own reader begins with; plait reads the manifest."""
    metadata = metadata_of(whole)
    places = metadata.storage_data.items()
    FileSystemWriter(folder).finish(
        metadata, [[WriteResult(index, info.length, info) for index, info in places]]
    )
    return record(folder / ".metadata")
