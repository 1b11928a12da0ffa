"""save_pretrained of a split model: what it takes, who must call it, and its inner models."""

import inspect
import time
from pathlib import Path

import pytest
import torch
import transformers

import plait
from plait import comm
from plait.errors import RankError, WeightsError
from plait.hf import saving
from plait.state import state_of
from plait.testing import add_noise, tiny


def split(name: str = "llama") -> torch.nn.Module:
    return plait.parallelize(add_noise(tiny.model(name, dtype=torch.float32)))


def test_every_argument_of_transformers_is_decided() -> None:
    own = set(inspect.signature(saving.save_pretrained).parameters) - {"model"}
    theirs = set(inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters)
    decided = own | {*saving._HUB, *saving._IDLE, *saving._REFUSED}
    assert theirs - {"self"} <= decided
    assert {*saving._NAMED} == own - {"save_directory", "kwargs"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"safe_serialization": False}, "safe_serialization: weights are written as safetensors"),
        ({"max_shard_sizes": "1GB"}, "there is no argument max_shard_sizes (closest: max_shard_si"),
        ({"state_dict": {"a": torch.zeros(1)}}, "state_dict: it would save something else"),
        ({"state_dict": {}}, "state_dict: it would save something else"),
        ({"distributed_checkpoint": True}, "distributed_checkpoint: save_pretrained writes an ord"),
        ({"zzz": None}, "there is no argument zzz\n"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_are_refused(given, text, tmp_path: Path) -> None:
    model = split()
    with pytest.raises(WeightsError) as caught:
        model.save_pretrained(tmp_path / "out", **given)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks(2)
def test_a_refusal_on_one_rank_ends_the_others(rank, tmp_path: Path) -> None:
    model = split()
    given = {"max_shard_sizes": 1} if rank == 1 else {}
    with pytest.raises(RankError if rank == 0 else WeightsError, match="max_shard_sizes"):
        model.save_pretrained(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks(2)
def test_arguments_that_change_nothing(tmp_path: Path) -> None:
    model = split()
    model.save_pretrained(
        tmp_path,
        is_main_process=True,
        safe_serialization=True,
        state_dict=None,
        token=None,
        save_peft_format=True,
        distributed_checkpoint=False,
        commit_message="x",
        create_pr=False,
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[n], x) for n, x in plait.full_state_dict(model).items())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("talked", [False, True], ids=["first collective", "later"])
def test_called_on_one_rank_only(talked, rank, tmp_path: Path, monkeypatch) -> None:
    assert saving.ARRIVAL_S <= 10
    monkeypatch.setattr(saving, "ARRIVAL_S", 1.0)
    model = split()
    mesh = state_of(model).tp_mesh
    limit = comm.set_timeout(mesh, 50.0)
    if talked:
        comm.exchange(None, mesh)
    out, done = tmp_path / "out", tmp_path / "done"
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RankError, match="call save_pretrained on all ranks") as caught:
            model.save_pretrained(out)
        assert time.monotonic() - start < 5
        assert "did not come within 1" in str(caught.value)
        assert caught.value.rank in range(1, mesh.size())
        done.touch()
    else:
        while not done.exists():  # a rank that does something else
            time.sleep(0.02)
        with pytest.raises(RankError, match="rank 0"):  # and hears of it where it comes next
            comm.exchange(None, mesh)
    assert not out.exists()
    assert comm.set_timeout(mesh, limit) == 50, "other collectives wait as long as before"
    torch.distributed.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llava"])
def test_a_model_inside_the_model(name: str, tmp_path: Path) -> None:
    model = split(name)
    inner = model.model
    assert state_of(inner) is not None
    inner.save_pretrained(tmp_path / "split")
    plain = tiny.model(name, dtype=torch.float32)
    if torch.distributed.get_rank() == 0:
        add_noise(plain).model.save_pretrained(tmp_path / "plain")
    torch.distributed.barrier()
    again = transformers.AutoModel.from_pretrained(tmp_path / "split")
    first = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    assert type(again) is type(first)
    assert first.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(first.state_dict()[n], x) for n, x in again.state_dict().items())
    from safetensors import safe_open

    stored = []
    for folder in ("plain", "split"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            stored.append(set(file.keys()))
    assert stored[0] == stored[1]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("directory", "size", "text"),
    [
        ("", "5GB", "no directory is named"),
        ("here", "5 parsecs", "max_shard_size='5 parsecs': that is no size"),
        ("here", 0, "max_shard_size=0: that is no size"),
        ("", -3, "max_shard_size=-3"),
    ],
)
def test_where_and_how_large_are_checked_first(
    directory: str, size: object, text: str, tmp_path: Path
) -> None:
    model = split()
    path = directory and tmp_path / directory
    with comm.count() as tally:
        with pytest.raises(WeightsError) as caught:
            model.save_pretrained(path, max_shard_size=size)
    assert text in str(caught.value) and not tally.forward
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:  # wrong on one rank only
        with pytest.raises(WeightsError):
            model.save_pretrained(path, max_shard_size=size)
    else:
        with pytest.raises(RankError, match="rank 1"):
            model.save_pretrained(tmp_path / "other")
    assert not list(tmp_path.iterdir())
