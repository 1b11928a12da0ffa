"""Checkpoints of several ranks: who writes what, who must call, what one failure does."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import plait
from plait import comm
from plait.checkpoint import held, latest, load, manifest, optimizers, save, writing
from plait.checkpoint.to_transformers import to_transformers
from plait.errors import CheckpointError, RankError
from plait.state import Piece
from plait.testing import add_noise, mutation, tiny
from plait.weights import outcome

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def trained(mesh: DeviceMesh, name: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A split model in float32 after one step, and its optimizer."""
    model: Any = add_noise(tiny.model(name, dtype=torch.float32, **options.pop("config", {})))
    config = options.pop("split", None)
    plait.parallelize(model, config, device_mesh=mesh, check=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    model(**tiny.batch(name)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bits(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: held.local_of(x).clone() for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, x in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = held.local_of(x).clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[k].dtype and torch.equal(x, b[k]) for k, x in a.items()
    )


def spoiled(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for x in [*model.state_dict().values(), *(x for s in optimizer.state.values() for x in s)]:
            if isinstance(x, torch.Tensor):
                held.local_of(x).fill_(3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    "axes",
    [{"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 1}],
    ids=str,
)
def test_round_trip_to_the_bit(axes: dict[str, int], form: dict[str, bool], tmp_path: Path) -> None:
    mesh = mesh_of(**axes)
    model, optimizer = trained(mesh, config=UNEVEN, **form)
    before = bits(model, optimizer)
    save(tmp_path, model, optimizer)
    spoiled(model, optimizer)
    load(tmp_path, model, optimizer)
    assert same(bits(model, optimizer), before)
    fresh, its = trained(mesh, config=UNEVEN, **form)
    its.state.clear()
    load(tmp_path, fresh, its)
    assert same(bits(fresh, its), before)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_offloaded_parameters_and_bfloat16(tmp_path: Path) -> None:
    split = plait.DistributedConfig(dp_shard_size=2, fsdp_cpu_offload=True)
    model, optimizer = trained(mesh_of(dp_shard=2, tp=1), split=split)
    before = bits(model, optimizer)
    save(tmp_path, model, optimizer)
    spoiled(model, optimizer)
    load(tmp_path, model, optimizer)
    assert same(bits(model, optimizer), before)
    half: Any = tiny.model("llama", dtype=torch.bfloat16)
    plait.parallelize(half, device_mesh=mesh_of(tp=2), check=False)
    load(tmp_path, half)
    whole = plait.full_state_dict(half)
    kept = plait.full_state_dict(model)
    assert all(torch.equal(whole[name], x.to(torch.bfloat16)) for name, x in kept.items())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_where_a_dtensor_says_it_lies_is_not_enough(name: str, tmp_path: Path) -> None:
    config = UNEVEN if name == "llama" else {}
    model, optimizer = trained(mesh_of(tp=4), name, config=config)
    expected = plait.full_state_dict(model)

    def as_placed(x: Any, layout: Any = None) -> list[Piece]:
        if not hasattr(x, "placements"):
            return [Piece((0,) * x.ndim, tuple(x.shape), (0,) * x.ndim)]
        _, at = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
        sizes = tuple(x.to_local().shape)
        return [Piece(tuple(at), sizes, (0,) * len(sizes))]

    def comes_back_whole() -> None:
        save(tmp_path, model, optimizer)
        plain = tiny.model(name, dtype=torch.float32, **config)
        load(tmp_path, plain)
        assert all(torch.equal(x, expected[n]) for n, x in plain.state_dict().items())

    comes_back_whole()
    with mutation.must_fail(held, "pieces_of", as_placed, (AssertionError, CheckpointError)):
        comes_back_whole()


@pytest.mark.ranks(2, 3, 4)
def test_every_byte_is_written_once_and_evenly(world_size: int, tmp_path: Path) -> None:
    model, optimizer = trained(mesh_of(tp=world_size), config=UNEVEN)
    path = save(tmp_path, model, optimizer)
    stored = manifest.read(path)
    for key, tensor in stored.tensors.items():
        marks = torch.zeros(tensor.shape, dtype=torch.int8)
        for chunk in tensor.chunks:
            part = marks
            for dim, (start, size) in enumerate(zip(*chunk.box, strict=True)):
                part = part.narrow(dim, start, size)
            part += 1
        assert (marks == 1).all(), key
    sizes = [f.nbytes for name, f in stored.files.items() if name.endswith(".distcp")]
    assert len(sizes) == world_size and max(sizes) < 1.25 * sum(sizes) / world_size


@pytest.mark.ranks(4)
def test_of_replicas_one_writes(tmp_path: Path) -> None:
    model, optimizer = trained(mesh_of(dp_replicate=2, dp_shard=2, tp=1))
    path = save(tmp_path, model, optimizer)
    sizes = [f.nbytes for n, f in manifest.read(path).files.items() if n.endswith(".distcp")]
    whole = 3 * sum(p.numel() * 4 for p in tiny.model("llama").parameters())
    assert whole < sum(sizes) < 1.6 * whole, "torch's wrapping of small tensors is the rest"
    assert max(sizes) < 1.25 * sum(sizes) / 4


class Position:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.ranks(4)
def test_random_numbers_and_positions(rank: int, tmp_path: Path) -> None:
    two, four = mesh_of(dp_shard=2, tp=2), mesh_of(tp=4)
    model, _ = trained(two)
    torch.manual_seed(100 + rank)
    own, first = torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(100))
    torch.manual_seed(100 + rank)
    save(tmp_path / "each", model, data=Position({"at": rank // 2}))
    torch.manual_seed(7)
    found = Position(None)
    load(tmp_path / "each", model, data=found)
    assert torch.equal(torch.rand(3), own) and found.state == {"at": rank // 2}

    other, _ = trained(four)
    load(tmp_path / "each", other)
    assert torch.equal(torch.rand(3), first), "another layout: the first rank's on all"
    with pytest.raises((CheckpointError, RankError), match="2 data ranks were at different pos"):
        load(tmp_path / "each", other, data=found)
    save(tmp_path / "one", model, data=Position({"at": 5, "x": torch.ones(2)}))
    load(tmp_path / "one", other, data=found)
    assert found.state["at"] == 5


@pytest.mark.ranks(2, 3)
def test_called_on_one_rank_only(rank: int, world_size: int, tmp_path: Path, monkeypatch) -> None:
    assert outcome.ARRIVAL_S <= 10
    monkeypatch.setattr(outcome, "ARRIVAL_S", 1.0)
    mesh = mesh_of(tp=world_size)
    model, optimizer = trained(mesh)
    done = tmp_path / "done"
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"call plait\.checkpoint\.save on all ranks"):
            save(tmp_path / "out", model, optimizer)
        assert time.monotonic() - begin < 5
        done.touch()
    else:
        while not done.exists():
            time.sleep(0.02)
        with pytest.raises(RankError, match="rank 0"):  # and hears of it where it comes next
            comm.exchange(None, mesh)
    assert not (tmp_path / "out").exists()
    dist.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "asynchronous"])
def test_one_rank_that_fails_ends_all(
    axes: dict[str, int], asynchronous: bool, rank: int, tmp_path: Path, monkeypatch
) -> None:
    model, optimizer = trained(mesh_of(**axes))
    save(tmp_path, model, optimizer, step=1)
    for failing in (0, 3):
        with monkeypatch.context() as patch:
            if rank == failing:

                def full(*args: Any, **kwargs: Any) -> Any:
                    raise OSError(28, "No space left on device")

                patch.setattr(writing, "write_chunks", full)
            begin = time.monotonic()
            with pytest.raises((CheckpointError, RankError), match=r"No space left|gave the check"):
                found = save(tmp_path, model, optimizer, step=2, asynchronous=asynchronous)
                if asynchronous:
                    found.wait()
            assert time.monotonic() - begin < 10
        dist.barrier()
        assert latest(tmp_path).name == "step-00000001"
    save(tmp_path, model, optimizer, step=2)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.ranks(3)
def test_a_model_that_does_not_fit_is_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    mesh = mesh_of(tp=3)
    model, optimizer = trained(mesh)
    path = save(tmp_path, model, optimizer)
    other, its = trained(mesh, config={"intermediate_size": 24})
    before = bits(other, its)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight: shape \(48, 96\) in it"):
        load(tmp_path, other, its)
    assert same(bits(other, its), before)
    dist.barrier()
    if rank == 0:
        file = path / "__2_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 4
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises((CheckpointError, RankError), match=r"__2_0\.distcp is damaged"):
        load(tmp_path, model, optimizer)


@pytest.mark.ranks(4)
def test_asynchronous_while_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained(mesh_of(dp_shard=2, tp=2))
    before = bits(model, optimizer)
    pending = save(tmp_path, model, optimizer, asynchronous=True)
    for seed in range(2):  # collectives of the training, under the thread's feet
        model(**tiny.batch("llama", seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pending.wait() == latest(tmp_path)
    load(tmp_path, model, optimizer)
    assert same(bits(model, optimizer), before)


@pytest.mark.ranks(4)
def test_two_groups_each_save_their_own(rank: int, tmp_path: Path) -> None:
    mesh = mesh_of(replica=2, tp=2)["tp"]
    model, optimizer = trained(mesh)
    out = tmp_path / str(rank // 2)
    with torch.no_grad():
        model.model.norm.weight.to_local().fill_(rank // 2)
    save(out, model, optimizer)
    plain = tiny.model("llama", dtype=torch.float32)
    load(out, plain)
    assert (plain.model.norm.weight == rank // 2).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["phi3", "gemma3_text"])
def test_becomes_a_model_directory(name: str, rank: int, tmp_path: Path) -> None:
    import transformers

    model, optimizer = trained(mesh_of(dp_shard=2, tp=2), name)
    save(tmp_path / "run", model, optimizer)
    expected = plait.full_state_dict(model)
    if rank == 0:
        to_transformers(tmp_path / "run", tmp_path / "plain")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
        assert again.keys() == expected.keys()
        assert all(torch.equal(x, expected[n]) for n, x in again.items())
        config = json.loads((tmp_path / "plain" / "config.json").read_text())
        assert config["architectures"] == [type(tiny.model(name)).__name__]
    dist.barrier()


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("old", [False, True], ids=["saved now", "saved before"])
def test_the_step_of_a_single_number_stays_as_the_optimizer_makes_it(
    form: dict[str, bool], old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(model: Any, optimizer: Any) -> None:
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def made() -> tuple[Any, Any]:
        model = Scaled()
        plait.parallelize(model, tp_plan={"up": "colwise", "down": "rowwise"}, check=False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, **form)

    model, optimizer = made()
    stepped(model, optimizer)
    expected = {k: type(x) for k, x in optimizer.state[model.scale].items()}
    with monkeypatch.context() as patch:
        if old:  # versions before took it for a tensor that lies as the parameter does
            patch.setattr(optimizers, "_counts", lambda *args: False)
        save(tmp_path, model, optimizer)
    again, its = made()
    load(tmp_path, again, its)
    state = its.state[again.scale]
    assert {k: type(x) for k, x in state.items()} == expected
    assert state["step"].dtype == optimizer.state[model.scale]["step"].dtype and state["step"] == 1
    for each in ((model, optimizer), (again, its)):
        stepped(*each)
    assert same(bits(again, its), bits(model, optimizer))


class Fussy(Position):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if dist.get_rank() == 1:
            raise ValueError("rank 1 does not take it")


@pytest.mark.ranks(3)
def test_where_one_rank_refuses_a_state_no_rank_is_changed(rank: int, tmp_path: Path) -> None:
    mesh = mesh_of(tp=3)
    model, optimizer = trained(mesh)
    save(tmp_path, model, optimizer, data=Position(5))
    spoiled(model, optimizer)
    before, here = bits(model, optimizer), Fussy(7)
    kept = dict(vars(here))
    with pytest.raises(ValueError if rank == 1 else RankError, match="rank 1"):
        load(tmp_path, model, optimizer, data=here)
    assert same(bits(model, optimizer), before) and vars(here) == kept
