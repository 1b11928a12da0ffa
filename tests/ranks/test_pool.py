"""The pool of ranks itself: what a body sees, and that nothing leaks between tests."""

import dataclasses
import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist


@dataclasses.dataclass
class Case:
    """A parameter of a type that only this test module knows."""

    factor: int


@pytest.fixture
def doubled(request):
    return request.param * 2


@pytest.mark.ranks(2, 3, 4)
def test_body_runs_on_every_rank(rank, world_size):
    assert dist.get_world_size() == world_size
    assert dist.get_rank() == rank
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    assert x.item() == sum(range(1, world_size + 1))


@pytest.mark.ranks(2)
def test_arguments_are_optional():
    assert dist.get_world_size() == 2
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.ranks(4)
def test_two_sub_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=groups[rank // 2])
    assert x.item() == (1.0 if rank < 2 else 5.0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", [Case(2), Case(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_reach_the_ranks(case, dtype, world_size):
    x = torch.full((1,), case.factor, dtype=dtype)
    dist.all_reduce(x)
    assert x.dtype == dtype
    assert x.item() == case.factor * world_size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("doubled", [1, 4], indirect=True)
def test_fixtures_are_evaluated_once_and_sent(doubled):
    assert doubled in (2, 8)


@pytest.mark.ranks(3)
def test_tmp_path_is_shared(tmp_path, rank, world_size):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


class TestMethods:
    """A test in a class runs on an instance that each rank makes."""

    offset = 10

    @pytest.mark.ranks(2)
    def test_method(self, rank):
        assert self.offset + rank == 10 + dist.get_rank()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", ["change everything", "find it as it was"])
def test_state_is_reset(turn, monkeypatch):
    draws = (random.random(), np.random.rand(), torch.rand(()).item())
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert "PLAIT_LEFT_BEHIND" not in os.environ
    assert "PLAIT_PATCHED" not in os.environ
    everywhere = [None, None]
    dist.all_gather_object(everywhere, draws)
    assert everywhere[0] == everywhere[1]
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    os.environ["PLAIT_LEFT_BEHIND"] = "1"
    monkeypatch.setenv("PLAIT_PATCHED", "1")
