"""The planners, reader and metadata with which torch.distributed.checkpoint moves plait's tensors.

A DTensor whose heads lie unevenly, or whose local tensor is several stretches of a packed weight,
is not where its placement says, so the boxes come from [`pieces_of`][plait.state.pieces.pieces_of].
Keys and shapes are those of the whole tensors: torch's own tools read the checkpoint too.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from plait.checkpoint.boxes import Box
from plait.checkpoint.held import Held
from plait.checkpoint.manifest import Manifest, StoredTensor
from plait.run import torch_private

Source = Any
"""Called with a key and a box: that part of the whole tensor."""


class BoxSavePlanner(SavePlanner):
    """Writes given boxes of given tensors.

    Args:
        tensors: The whole tensors' shapes and dtypes.
        shares: The boxes of each that this rank writes.
        source: From a key and a box to the tensor; called when it is written.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        shares: Mapping[str, Iterable[Box]],
        source: Source,
    ) -> None:
        self._tensors = tensors
        self._shares = shares
        self._source = source

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """All is known already."""

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes."""
        items = []
        for key, boxes in self._shares.items():
            shape, dtype = self._tensors[key]
            for offsets, sizes in boxes:
                data = TensorWriteData(
                    _chunk(offsets, sizes), TensorProperties(dtype), torch.Size(shape)
                )
                index = MetadataIndex(key, torch.Size(offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Not used: the shares were dealt out before."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of one box."""
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        x: torch.Tensor = self._source(
            write_item.index.fqn, (tuple(chunk.offsets), tuple(chunk.sizes))
        )
        return x.detach()


class BoxLoadPlanner(LoadPlanner):
    """Fills the pieces that this rank holds.

    Args:
        wanted: Keys, and where the parts of each go; a key may come several times.
    """

    def __init__(self, wanted: Sequence[tuple[str, Held]]) -> None:
        self._wanted = wanted
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes what the checkpoint holds."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for place, (key, held) in enumerate(self._wanted):
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [_chunk(piece.offsets, piece.sizes) for piece in held.pieces]
            for item in create_read_items_for_chunk_list(key, stored, chunks):
                there = dataclasses.replace(item.dest_index, fqn=str(place))
                items.append(dataclasses.replace(item, dest_index=there))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank's own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Nothing is stored as bytes."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the local tensor that one read fills."""
        held = self._wanted[int(read_item.dest_index.fqn)][1]
        assert read_item.dest_index.index is not None
        x = held.pieces[read_item.dest_index.index].of(held.local)
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            x = x.narrow(dim, start, size)
        return x

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was filled in place."""


class ChunkReader(FileSystemReader):
    """Reads chunks of a checkpoint; each once, in the order in which they lie in the files.

    Args:
        folder: The checkpoint.
        manifest: What it holds.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self.metadata = metadata_of(manifest)
        self.storage_data = self.metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From the manifest: nothing is unpickled."""
        return self.metadata

    def chunk(self, file: Any, index: MetadataIndex) -> torch.Tensor:
        """One stored chunk, from its open file."""
        info = self.storage_data[index]
        x: torch.Tensor = torch.load(
            torch_private.slice_of(self, file, info), map_location="cpu", weights_only=True
        )
        return x

    def items(self, wanted: Sequence[tuple[str, Held]]) -> list[ReadItem]:
        """What `fill` would read; raises as it would where something is not stored."""
        return self._planned(wanted)[1]

    def _planned(
        self, wanted: Sequence[tuple[str, Held]]
    ) -> "tuple[BoxLoadPlanner, list[ReadItem]]":
        planner = BoxLoadPlanner(wanted)
        planner.set_up_planner({}, self.metadata)
        return planner, list(planner.create_local_plan().items)

    def fill(self, wanted: Sequence[tuple[str, Held]]) -> None:
        """Copies what this rank holds of each tensor into its place, cast to its dtype."""
        planner, items = self._planned(wanted)
        by_file: dict[str, dict[int, list[ReadItem]]] = {}
        for item in items:
            info = self.storage_data[item.storage_index]
            place = by_file.setdefault(info.relative_path, {})
            place.setdefault(info.offset, []).append(item)
        with torch.no_grad():
            for name, by_offset in by_file.items():
                with open(Path(self.path) / name, "rb") as file:
                    for _, items in sorted(by_offset.items()):
                        stored = self.chunk(file, items[0].storage_index)
                        for item in items:
                            planner.resolve_tensor(item).copy_(_part(stored, item))


def write_chunks(
    folder: Path, planner: BoxSavePlanner, rank: int, writer: FileSystemWriter
) -> list[WriteResult]:
    """Writes this rank's boxes into a file of its own."""
    plan = planner.create_local_plan()
    if not plan.items:
        return []
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(plan)
    results: list[WriteResult] = writer.write_data(plan, planner).wait()
    return results


def metadata_of(manifest: Manifest) -> Metadata:
    """The manifest in torch's words."""
    tensors: dict[str, Any] = {}
    places = {}
    for key, tensor in manifest.tensors.items():
        tensors[key] = _stored(tensor)
        for chunk in tensor.chunks:
            index = MetadataIndex(key, torch.Size(chunk.box[0]))
            places[index] = torch_private.stored_at(chunk.file, chunk.offset, chunk.nbytes)
    return Metadata(tensors, storage_data=places)


def _stored(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [_chunk(*chunk.box) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tuple(offsets)), torch.Size(tuple(sizes)))


def _part(stored: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, size)
    return stored
