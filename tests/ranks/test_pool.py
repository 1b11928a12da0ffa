"""The pool of ranks itself: what a body sees, and that nothing leaks between tests."""

import os
import random

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2, 3, 4)
def test_body_runs_on_every_rank(rank, world_size):
    assert dist.get_world_size() == world_size
    assert dist.get_rank() == rank
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    assert x.item() == sum(range(1, world_size + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(20))
def test_speed(i):
    pass
