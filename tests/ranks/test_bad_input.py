"""Bad input: a clear error on all ranks within seconds, never a hang, nothing left behind."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import LayoutError, PlaitError, PlanError, RankError, WeightsError
from plait.testing import add_noise, run_ranks, tiny

LIMIT_S = 5.0


@contextmanager
def refused(kind: type[Exception] | tuple[type[Exception], ...], *texts: str) -> Iterator[None]:
    """Expect an error of this kind, with these texts, within the limit, on every rank."""
    begin = time.perf_counter()
    with pytest.raises(kind) as caught:
        yield
    seconds = time.perf_counter() - begin
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    assert seconds < LIMIT_S, f"it took {seconds:.1f} s"


def config(**kwargs: Any) -> plait.DistributedConfig:
    return plait.DistributedConfig(tp_size=torch.distributed.get_world_size(), **kwargs)


def read(path: Path, **kwargs: Any) -> Any:
    kwargs.setdefault("distributed_config", config())
    return plait.AutoModelForCausalLM.from_pretrained(path, **kwargs)


def rank() -> int:
    return torch.distributed.get_rank()


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A tiny Llama in several files, made once, before the ranks start."""
    path = tmp_path / "model"
    model = add_noise(tiny.model("llama", dtype=torch.float32))
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def a_file(path: Path, number: int = 1) -> Path:
    return sorted(path.glob("*.safetensors"))[number]


def cut_short(path: Path) -> None:
    file = a_file(path)
    file.write_bytes(file.read_bytes()[:-100])


def garble_header(path: Path) -> None:
    file = a_file(path)
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(bytes(content))


def huge_header(path: Path) -> None:
    file = a_file(path)
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])


def empty_file(path: Path) -> None:
    a_file(path).write_bytes(b"")


def remove_a_file(path: Path) -> None:
    a_file(path).unlink()


def remove_all_weights(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()


def wrong_shape(path: Path) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"intermediate_size": 60}))


def garble_config(path: Path) -> None:
    (path / "config.json").write_text("{ not json")


def remove_everything(path: Path) -> None:
    shutil.rmtree(path)


DAMAGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    cut_short: ("model-00002",),
    garble_header: ("model-00002",),
    huge_header: ("model-00002",),
    empty_file: ("model-00002",),
    remove_a_file: ("model-00002",),
    remove_all_weights: ("config.json",),
    wrong_shape: ("mlp.", "(60, 96)", "(48, 96)"),
    garble_config: ("config",),
    remove_everything: ("model",),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoints(damage: Callable[[Path], None], model_path: Path) -> None:
    if rank() == 0:
        damage(model_path)
    torch.distributed.barrier()
    with refused(WeightsError, *DAMAGES[damage]):
        read(model_path)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("damage", [cut_short, remove_a_file, remove_everything])
def test_a_checkpoint_that_only_one_rank_finds_damaged(
    damage: Callable[[Path], None], model_path: Path
) -> None:
    if rank() == 1:
        own = model_path.with_name("own")
        shutil.copytree(model_path, own)
        damage(own)
        with refused(WeightsError):
            read(own)
    else:
        with refused(RankError, "rank 1"):
            read(model_path)
    torch.distributed.barrier()


@pytest.mark.ranks(2)
def test_plans_and_sizes(model_path: Path) -> None:
    with refused(PlanError, "'layers.*.mlp.gate'", "model.layers.*.mlp.gate_proj"):
        read(model_path, distributed_config=config(tp_plan={"layers.*.mlp.gate": "colwise"}))
    with refused(PlanError, "'colwize'", "colwise"):
        read(model_path, distributed_config=config(tp_plan={"lm_head": "colwize"}))
    with refused(PlanError, "model.norm", "LlamaRMSNorm"):
        read(model_path, distributed_config=config(tp_plan={"model.norm": "rowwise"}))
    with refused(LayoutError, "3", "2"):
        read(model_path, distributed_config=plait.DistributedConfig(tp_size=3))
    with refused(LayoutError, "device_map"):
        read(model_path, device_map="cpu")


@pytest.mark.ranks(2, 3)
def test_a_plan_that_differs_between_the_ranks(model_path: Path) -> None:
    plan = {"lm_head": "replicate"} if rank() == 1 else {}
    with refused(PlaitError, "rank"):
        read(model_path, distributed_config=config(tp_plan={"model.norm": "replicate", **plan}))


@pytest.mark.ranks(2, 3)
def test_different_input_shapes_are_named_on_all_ranks() -> None:
    model = plait.parallelize(tiny.model("llama"))
    ids = torch.ones(1, 5 + rank(), dtype=torch.long)
    with refused(PlaitError, "5", "6"), torch.no_grad():
        model(input_ids=ids)
    with refused(PlaitError, "5", "6"):
        model.generate(ids, max_new_tokens=2)


@pytest.mark.ranks(2)
def test_the_same_model_still_works_after_a_refusal() -> None:
    model = plait.parallelize(tiny.model("llama"))
    with refused(PlaitError), torch.no_grad():
        model(input_ids=torch.ones(1, 5 + rank(), dtype=torch.long))
    assert model(input_ids=torch.ones(1, 5, dtype=torch.long)).logits.shape == (1, 5, 96)


@pytest.mark.ranks(2)
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    model = plait.parallelize(tiny.model("llama"))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with refused((WeightsError, RankError), "file"):
        model.save_pretrained(blocked / "inner")
    assert os.listdir(tmp_path) == ["file"] and blocked.read_text() == "in the way"


def die_in_the_forward() -> str:
    import torch.distributed as dist

    model = plait.parallelize(tiny.model("llama"))
    ids = torch.ones(1, 5, dtype=torch.long)
    model(input_ids=ids)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.perf_counter()
    try:
        model(input_ids=ids)
    except RankError as error:
        return f"{time.perf_counter() - begin:.1f} {error}"
    return "nothing was noticed"


def test_a_killed_rank_is_named_by_the_others() -> None:
    outcomes = run_ranks(die_in_the_forward, 3, check=False, grace=10.0)
    for survivor in (0, 2):
        text = str(outcomes[survivor].value)
        assert "rank 1" in text, text
        assert float(text.split()[0]) < LIMIT_S
