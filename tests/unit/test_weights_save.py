"""Writing a checkpoint: the bytes of the safetensors library, nothing left after a failure."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from plait.errors import WeightsError
from plait.plan.intervals import ParamLayout, even, packed
from plait.weights import Concat, ModuleStore, Narrow, Source, Transpose, save, saving
from plait.weights.module_store import in_order
from plait.weights.saving import byte_count


def model():
    torch.manual_seed(0)
    built = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    built[1].to(torch.bfloat16)
    built.register_buffer("steps", torch.arange(3))
    built.register_buffer("flag", torch.tensor(True))
    built.register_buffer("table", torch.ones(2), persistent=False)
    return built


def files(path):
    return sorted(item.name for item in path.iterdir())


def test_one_file_is_that_of_the_safetensors_library_byte_for_byte(tmp_path):
    whole = model()
    report = save(ModuleStore(whole), None, tmp_path / "ours")
    save_file(whole.state_dict(), tmp_path / "theirs.safetensors", {"format": "pt"})
    ours = tmp_path / "ours" / "model.safetensors"
    assert ours.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert report.files == (ours,)
    assert report.total_bytes == sum(x.nbytes for x in whole.state_dict().values())
    assert str(report).endswith("s to 1 file")


def test_shards_index_and_what_an_earlier_save_left(tmp_path):
    whole = model()
    save(ModuleStore(whole), None, tmp_path)
    assert files(tmp_path) == ["model.safetensors"]
    report = save(ModuleStore(whole), None, tmp_path, max_shard_size="300B")
    names = [file.name for file in report.files]
    assert files(tmp_path) == sorted(names)
    assert names[-1] == "model.safetensors.index.json"
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == report.total_bytes
    read = {}
    for name in names[:-1]:
        held = load_file(tmp_path / name)
        assert {index["weight_map"][key] for key in held} == {name}
        assert sum(x.nbytes for x in held.values()) <= 300 or len(held) == 1
        read |= held
    assert read.keys() == whole.state_dict().keys()
    for key, x in whole.state_dict().items():
        assert torch.equal(x, read[key])
    save(ModuleStore(whole), None, tmp_path, max_shard_size="400B")
    assert "00003-of-00003" in " ".join(files(tmp_path))
    save(ModuleStore(whole), None, tmp_path, max_shard_size=10**6)
    assert files(tmp_path) == ["model.safetensors"]


def test_recipes_names_and_ties(tmp_path):
    whole = model()
    whole[3].weight = nn.Parameter(torch.randn(10, 8))
    pair = nn.ModuleDict({"a": whole[1].float(), "b": nn.Linear(6, 8)})
    pair["b"].weight = pair["a"].weight
    store = ModuleStore(pair)
    assert set(store.keys()) == {"a.weight", "a.bias", "b.bias"}
    recipes = {
        "both.bias": Concat(0, (Source("a.bias"), Source("b.bias"))),
        "turned": Transpose(0, 1, Source("a.weight")),
        "top": Narrow(0, 0, 3, Source("a.weight")),
    }
    save(store, recipes, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["turned"], pair["a"].weight.T)
    assert torch.equal(read["top"], pair["a"].weight[:3])
    assert torch.equal(read["both.bias"], torch.cat([pair["a"].bias, pair["b"].bias]))


def test_variant(tmp_path):
    save(ModuleStore(model()), None, tmp_path, variant="fp16")
    save(ModuleStore(model()), None, tmp_path, variant="big", max_shard_size=400)
    assert "model.fp16.safetensors" in files(tmp_path)
    assert "model.safetensors.index.big.json" in files(tmp_path)
    assert "model.big-00001-of-00003.safetensors" in files(tmp_path)


def test_a_failure_leaves_the_directory_as_it_was(tmp_path):
    whole = model()
    save(ModuleStore(whole), None, tmp_path, max_shard_size=300)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Broken(Source):
        def read(self, *args, **kwargs):
            raise OSError(28, "No space left on device")

        def read_into(self, *args, **kwargs):
            raise OSError(28, "No space left on device")

    recipes = {"0.weight": Source("0.weight"), "x": Narrow(0, 0, 1, Broken("1.weight"))}
    with pytest.raises(WeightsError, match="No space left"):
        save(ModuleStore(whole), recipes, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(WeightsError, match="No space left"):
        save(ModuleStore(whole), recipes, tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


def test_bad_requests_are_refused_before_writing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="is a file, not a directory"):
        save(ModuleStore(model()), None, tmp_path / "file" / "below")
    with pytest.raises(WeightsError, match="nothing to save"):
        save(ModuleStore(nn.ReLU()), None, tmp_path / "a")
    with pytest.raises(WeightsError, match="5 GX"):
        save(ModuleStore(model()), None, tmp_path / "a", max_shard_size="5 GX")
    assert files(tmp_path) == ["file"]


def test_a_disk_too_small_is_refused_with_both_numbers(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr("plait.weights.saving.shutil.disk_usage", lambda path: usage)
    with pytest.raises(WeightsError, match=r"it takes \d+ B, the disk has 100 B"):
        save(ModuleStore(model()), None, tmp_path / "a")
    assert files(tmp_path) == []


def test_sizes():
    assert byte_count("5GB") == 5 * 10**9
    assert byte_count("1.5 KiB") == 1536
    assert byte_count("200") == byte_count(200) == byte_count("200B") == 200


@pytest.mark.parametrize(
    "layout",
    [
        even((7, 3), 0, 3),
        packed((12, 3), 0, 3, (6, 6)),
        packed((3, 10), 1, 2, (3, 7)),
        ParamLayout((4, 2), 0, (((0, 2),), ((0, 2), (2, 4))), shared=True),
    ],
)
def test_gathered_pieces_come_back_in_order(layout):
    whole = torch.arange(1.0, layout.numel + 1).view(layout.shape)
    parts = [
        torch.cat([whole.narrow(layout.dim, a, b - a) for a, b in rank], layout.dim)
        for rank in layout.pieces
    ]
    gathered = torch.cat(parts, layout.dim)
    assert torch.equal(in_order(gathered, layout), whole)


@pytest.mark.parametrize("size", [0, -1, True, None, 1.5, "", "abc", "5 parsecs", "1..2GB", "-5GB"])
def test_sizes_that_are_none(size, tmp_path):
    with pytest.raises(WeightsError, match="that is no size"):
        byte_count(size)
    if isinstance(size, int | str):
        with pytest.raises(WeightsError, match="that is no size"):
            save(ModuleStore(model()), None, tmp_path, max_shard_size=size)
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(saving.os, "access", lambda path, mode: False)
    with pytest.raises(WeightsError, match="cannot be written"):
        save(ModuleStore(model()), None, tmp_path / "a" / "b")
    assert files(tmp_path) == []
