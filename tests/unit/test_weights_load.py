"""Reading a checkpoint into a module: only owned bytes, right values, right errors."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait import weights
from plait.errors import WeightsError
from plait.plan.intervals import ParamLayout, even, packed
from plait.weights import LoadReport, Source, load, open_checkpoint


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.fixture
def saved(tmp_path):
    whole = model()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    return whole, tmp_path


def on_meta():
    with torch.device("meta"):
        return model()


def sources(checkpoint):
    return {key: Source(key) for key in checkpoint.keys()}  # noqa: SIM118


def test_whole_model(saved):
    whole, path = saved
    empty = on_meta()
    with open_checkpoint(path) as checkpoint:
        report = load(empty, checkpoint, sources(checkpoint))
    for name, x in whole.state_dict().items():
        assert torch.equal(x, empty.state_dict()[name]), name
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in empty.parameters())
    assert report.bytes_read == report.total_bytes == sum(p.nbytes for p in whole.parameters())
    assert (report.missing, report.unexpected) == ((), ())
    line = str(replace(report, seconds=0.44))
    assert line == "read 672 B of 672 B in 0.4 s from 1 file; 0 missing, 0 unexpected"


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("n", [2, 3])
def test_each_rank_reads_its_own_bytes(saved, dim, n):
    whole, path = saved
    read = 0
    for rank in range(n):
        with open_checkpoint(path) as checkpoint:
            for name, x in whole.state_dict().items():
                layout = even(x.shape, dim, n)
                piece = checkpoint.read(name, layout.dim, layout.pieces[rank])
                chunks = x.chunk(n, dim)
                expected = chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)
                assert torch.equal(piece, expected), name
            read += checkpoint.bytes_read
    assert read == sum(x.nbytes for x in whole.parameters())


def test_packed_pieces_and_casts(saved):
    whole, path = saved
    layout = packed((8, 6), 0, 2, (4, 4))
    with open_checkpoint(path) as checkpoint:
        piece = checkpoint.read("1.weight", 0, layout.pieces[1], torch.bfloat16)
        assert checkpoint.bytes_read == 4 * 6 * 4
    expected = whole[1].weight[[2, 3, 6, 7]].bfloat16()
    assert torch.equal(piece, expected)


def test_missing_unexpected_and_not_stored(saved):
    _, path = saved
    empty = on_meta()
    empty.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    empty.register_buffer("counts", torch.empty(3, device="meta"))
    with open_checkpoint(path) as checkpoint:
        recipes = sources(checkpoint)
        del recipes["3.bias"]
        report = load(empty, checkpoint, recipes)
    assert report.missing == ("counts", "3.bias")
    assert report.unexpected == ("3.bias",)
    assert report.not_stored == ("table",)


def test_tied_parameters_stay_tied_and_are_read_once(tmp_path):
    def tied():
        pair = nn.ModuleDict({"a": nn.Embedding(5, 3), "b": nn.Linear(3, 5, bias=False)})
        pair["b"].weight = pair["a"].weight
        return pair

    whole = tied()
    save_file({"a.weight": whole["a"].weight.detach()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = tied()
    with open_checkpoint(tmp_path) as checkpoint:
        recipes = {"a.weight": Source("a.weight"), "b.weight": Source("a.weight")}
        report = load(empty, checkpoint, recipes)
    assert empty["b"].weight is empty["a"].weight
    assert torch.equal(empty["a"].weight, whole["a"].weight)
    assert report.bytes_read == 60
    assert report.missing == ()


def test_real_parameters_are_overwritten_in_place(saved):
    whole, path = saved
    other = model()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    pointers = [p.data_ptr() for p in other.parameters()]
    with open_checkpoint(path) as checkpoint:
        load(other, checkpoint, sources(checkpoint))
    assert [p.data_ptr() for p in other.parameters()] == pointers
    assert torch.equal(other[1].weight, whole[1].weight)


def test_dtype_of_decides(saved):
    _, path = saved
    empty = on_meta()
    with open_checkpoint(path) as checkpoint:
        load(
            empty,
            checkpoint,
            sources(checkpoint),
            dtype_of=lambda name, dtype: torch.float16 if name.startswith("1") else dtype,
        )
    assert empty[1].weight.dtype == torch.float16
    assert empty[0].weight.dtype == torch.float32


def test_all_problems_in_one_error_before_reading(saved):
    _, path = saved
    empty = on_meta()
    empty[3] = nn.Linear(8, 5, device="meta")
    gap = ParamLayout((8, 6), 0, (((0, 3),), ((4, 8),)))
    with open_checkpoint(path) as checkpoint:
        recipes = sources(checkpoint) | {"9.weight": Source("1.weight"), "1.bias": Source("nope")}
        with pytest.raises(WeightsError) as error:
            load(empty, checkpoint, recipes, {"1.weight": gap})
        assert checkpoint.bytes_read == 0
        assert weights.mismatches(empty, checkpoint, sources(checkpoint)) == {
            "3.weight": ((4, 8), (5, 8)),
            "3.bias": ((4,), (5,)),
        }
    text = str(error.value)
    assert "3.weight: (4, 8) in the checkpoint, (5, 8) in the module" in text
    assert "no rank holds [3, 4) of dim 0" in text
    assert "no parameter or buffer 9.weight" in text
    assert "1.bias is made of nope" in text


def test_unknown_key_names_near_ones(saved):
    _, path = saved
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(WeightsError, match=r"near: 1\.weight"),
    ):
        checkpoint.read("1.wieght")


def test_bin_files(tmp_path):
    whole = model()
    names = list(whole.state_dict())
    half = {name: whole.state_dict()[name] for name in names[:3]}
    rest = {name: whole.state_dict()[name] for name in names[3:]}
    torch.save(half, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(rest, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {
        name: f"pytorch_model-0000{1 if name in half else 2}-of-00002.bin" for name in names
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    empty = on_meta()
    with open_checkpoint(tmp_path) as checkpoint:
        load(empty, checkpoint, sources(checkpoint))
        piece = checkpoint.read("1.weight", 1, ((4, 6),))
    assert torch.equal(piece, whole[1].weight[:, 4:])
    assert torch.equal(empty[3].weight, whole[3].weight)
    (tmp_path / "broken.bin").write_bytes(b"not a pickle")
    with pytest.raises(WeightsError, match=r"broken\.bin"):
        open_checkpoint(tmp_path / "broken.bin")


def large(tmp_path):
    torch.manual_seed(0)
    whole = nn.Linear(300, 200)
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    return whole


@pytest.mark.parametrize("mapped", [True, False])
def test_mapped_parameters_are_the_same_and_never_change_the_file(tmp_path, mapped):
    whole = large(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.device("meta"):
        empty, other = nn.Linear(300, 200), nn.Linear(300, 100)
    layouts = {"weight": even((200, 300), 0, 2), "bias": even((200,), 0, 2)}
    with open_checkpoint(tmp_path, mapped=mapped) as checkpoint:
        load(empty, checkpoint, sources(checkpoint))
        report = load(other, checkpoint, sources(checkpoint), layouts, rank=1)
    assert report.bytes_read == (100 * 300 + 100) * 4
    assert torch.equal(other.weight, whole.weight[100:])
    assert other.weight.untyped_storage().nbytes() == other.weight.nbytes
    assert torch.equal(empty.weight, whole.weight)
    with torch.no_grad():
        empty.weight.zero_()
        empty(torch.ones(2, 300)).sum()
    assert torch.equal(other.weight, whole.weight[100:])
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_save_over_the_loaded_file_keeps_the_loaded_values(tmp_path):
    whole = large(tmp_path)
    with torch.device("meta"):
        empty = nn.Linear(300, 200)
    with open_checkpoint(tmp_path) as checkpoint:
        load(empty, checkpoint, sources(checkpoint))
    weights.save(weights.ModuleStore(empty), None, tmp_path)
    assert torch.equal(empty.weight, whole.weight)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("weight"), whole.weight)


def test_the_report_names_what_was_not_used():
    report = LoadReport(1, 1, 1, 0.0, missing=("a",), unexpected=tuple("bcdefg"))
    assert "1 missing (a), 6 unexpected (b, c, d, e, …)" in str(report)
