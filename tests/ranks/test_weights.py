"""Loading and saving on several ranks: DTensors, shared outcome, one writer."""

import shutil
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plait import mesh as meshes
from plait.errors import PlaitError, RankError, WeightsError
from plait.layout import ParallelismConfig
from plait.plan.intervals import ParamLayout, packed
from plait.weights import ModuleStore, Source, load, open_checkpoint, save, together

PLACED = {
    "0.weight": [Shard(0)],
    "1.weight": [Shard(0)],
    "1.bias": [Shard(0)],
    "2.weight": [Shard(1)],
    "2.bias": [Replicate()],
}


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 7))


def tp_mesh(world_size):
    mesh = meshes.build(ParallelismConfig(tp_size=world_size).resolve(world_size), "cpu")
    return meshes.axis(mesh, "tp")


def split_on_meta(mesh, placed=PLACED):
    with torch.device("meta"):
        model = whole_model()
    for name, placements in placed.items():
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        x = distribute_tensor(owner._parameters[leaf], mesh, placements, src_data_rank=None)
        owner._parameters[leaf] = nn.Parameter(x)
    return model


def sources(checkpoint):
    return {key: Source(key) for key in checkpoint.keys()}  # noqa: SIM118


@pytest.fixture
def saved(tmp_path):
    save_file(whole_model().state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.ranks(2, 3, 4)
def test_every_rank_reads_its_shards_into_dtensors(saved, rank, world_size):
    mesh, whole = tp_mesh(world_size), whole_model().state_dict()
    model = split_on_meta(mesh)
    with open_checkpoint(saved) as checkpoint:
        report = load(model, checkpoint, sources(checkpoint), mesh=mesh)
    owned = 0
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert isinstance(p.data, DTensor)
        assert list(p.placements) == PLACED[name]
        expected = distribute_tensor(whole[name], mesh, PLACED[name], src_data_rank=None)
        assert torch.equal(p.to_local(), expected.to_local()), name
        owned += p.to_local().nbytes
    assert report.bytes_read == owned < sum(x.nbytes for x in whole.values())
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), whole[name])  # the last: it communicates


@pytest.mark.ranks(2, 3)
def test_packed_layouts_and_save_restore_the_file(saved, rank, world_size, tmp_path):
    mesh, whole = tp_mesh(world_size), whole_model().state_dict()
    layout = packed((10, 6), 0, world_size, (4, 6))
    model = split_on_meta(mesh, {"2.weight": [Shard(1)]})
    local = torch.empty(layout.local_shape(rank), device="meta")
    spec = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=(10, 6), stride=(6, 1)
    )
    model[1].weight = nn.Parameter(spec)
    layouts = {"1.weight": layout}
    with open_checkpoint(saved) as checkpoint:
        load(model, checkpoint, sources(checkpoint), layouts, mesh=mesh)
    rows = [i for a, b in layout.pieces[rank] for i in range(a, b)]
    assert torch.equal(model[1].weight.to_local(), whole["1.weight"][rows])
    store = ModuleStore(model, layouts, mesh)
    report = save(store, None, tmp_path / "again", max_shard_size="400B")
    dist.barrier()
    read = {}
    for file in report.files:
        read |= load_file(file) if file.suffix == ".safetensors" else {}
    assert read.keys() == whole.keys()
    for name, x in whole.items():
        assert torch.equal(read[name], x), name
    save(store, None, tmp_path / "one")
    dist.barrier()
    written = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert written == (saved / "model.safetensors").read_bytes()


@pytest.mark.ranks(2)
def test_mutation_pieces_in_rank_order_are_seen(saved, rank, monkeypatch, tmp_path):
    mesh, whole = tp_mesh(2), whole_model().state_dict()
    with torch.device("meta"):
        model = whole_model()
    layout = packed((10, 6), 0, 2, (4, 6))
    model[1].weight = nn.Parameter(torch.empty(layout.local_shape(rank), device="meta"))
    with open_checkpoint(saved) as checkpoint:
        load(model, checkpoint, sources(checkpoint), {"1.weight": layout}, mesh=mesh)
    monkeypatch.setattr("plait.weights.module_store.in_order", lambda x, layout: x)
    save(ModuleStore(model, {"1.weight": layout}, mesh), None, tmp_path / "wrong")
    dist.barrier()
    read = load_file(tmp_path / "wrong" / "model.safetensors")
    assert not torch.equal(read["1.weight"], whole["1.weight"])
    assert torch.equal(read["0.weight"], whole["0.weight"])


@pytest.mark.ranks(2, 3)
def test_a_file_that_one_rank_misses_fails_everywhere(saved, rank, world_size, tmp_path):
    mesh = tp_mesh(world_size)
    mine = tmp_path / f"rank{rank}"
    mine.mkdir()
    shutil.copy(saved / "model.safetensors", mine)
    if rank == 1:
        (mine / "model.safetensors").unlink()
    begin = time.perf_counter()
    with pytest.raises(PlaitError) as error:
        together(mesh, "Open the checkpoint.", lambda: open_checkpoint(mine))
    assert time.perf_counter() - begin < 5
    if rank == 1:
        assert type(error.value) is WeightsError
    else:
        assert type(error.value) is RankError
        assert error.value.rank == 1
        assert "rank 1 failed: WeightsError" in str(error.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("missing", [8, 600])
def test_a_file_cut_after_it_was_opened_fails_everywhere(saved, rank, tmp_path, missing):
    mesh = tp_mesh(2)
    mine = tmp_path / f"rank{rank}"
    mine.mkdir()
    shutil.copy(saved / "model.safetensors", mine)
    model = split_on_meta(mesh)
    with open_checkpoint(mine) as checkpoint:
        if rank == 0:
            with (mine / "model.safetensors").open("r+b") as file:
                file.truncate((mine / "model.safetensors").stat().st_size - missing)
        with pytest.raises(PlaitError) as error:
            load(model, checkpoint, sources(checkpoint), mesh=mesh)
    assert type(error.value) is (WeightsError if rank == 0 else RankError)
    assert "it was cut after it was opened" in str(error.value)


@pytest.mark.ranks(2)
def test_ranks_that_disagree_are_told(saved, rank):
    mesh = tp_mesh(2)
    model = split_on_meta(mesh, {})
    layout = ParamLayout((10,), 0, (((0, 5),), ((5, 10),)))
    with torch.device("meta"):
        model[1].bias = nn.Parameter(torch.empty(5))
    other = ParamLayout((10,), 0, (((0, 5),), ((5, 10),)), shared=True)
    with open_checkpoint(saved) as checkpoint:
        layouts = {"1.bias": layout if rank == 0 else other}
        with pytest.raises(PlaitError, match="rank 1 has another plan"):
            load(model, checkpoint, sources(checkpoint), layouts, mesh=mesh)
        assert checkpoint.bytes_read == 0


@pytest.mark.ranks(2)
def test_a_failing_writer_is_named_and_leaves_nothing(saved, rank, tmp_path, monkeypatch):
    mesh = tp_mesh(2)
    model = split_on_meta(mesh)
    with open_checkpoint(saved) as checkpoint:
        load(model, checkpoint, sources(checkpoint), mesh=mesh)

    def full(handle, data, position):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.weights.saving._write_all", full)
    begin = time.perf_counter()
    with pytest.raises(PlaitError) as error:
        save(ModuleStore(model, mesh=mesh), None, tmp_path / "out")
    assert time.perf_counter() - begin < 5
    assert type(error.value) is (WeightsError if rank == 0 else RankError)
    assert "No space left" in str(error.value)
    dist.barrier()
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks(2)
def test_saving_on_one_rank_only_says_so(saved, rank, tmp_path):
    from plait import comm

    mesh = tp_mesh(2)
    model = split_on_meta(mesh)
    with open_checkpoint(saved) as checkpoint:
        load(model, checkpoint, sources(checkpoint), mesh=mesh)
    before = comm.set_timeout(mesh, 1.0)
    try:
        if rank == 0:
            begin = time.perf_counter()
            with pytest.raises(RankError, match="rank 1"):
                save(ModuleStore(model, mesh=mesh), None, tmp_path / "out")
            assert time.perf_counter() - begin < 5
    finally:
        comm.set_timeout(mesh, before)
    assert not (tmp_path / "out").exists()
    if rank == 1:
        time.sleep(2.5)  # until rank 0 has given up
        with pytest.raises(RankError, match="rank 0"):
            comm.exchange(None, mesh)
