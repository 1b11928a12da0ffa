"""The process group under a real launcher: joined once, left quietly."""

import sys

import pytest
import torch
import torch.distributed as dist

from plait.run import environment, process_group
from plait.testing import run_ranks


def join():
    first = process_group.ensure()
    group = dist.group.WORLD
    again = process_group.ensure("cpu", timeout_s=1.0)
    x = torch.ones(1)
    dist.all_reduce(x)
    place = environment.world()
    return (str(first), first == again, group is dist.group.WORLD, x.item(), place)


def test_ensure_joins_what_the_launcher_started():
    for rank, found in enumerate(run_ranks(join, 2, backend=None)):
        assert found == ("cpu", True, True, 2.0, environment.World(rank, 2, rank, launched=True))


def keep_existing():
    group = dist.group.WORLD
    process_group.ensure()
    return group is dist.group.WORLD, dist.get_backend()


def test_an_existing_group_is_used_as_it_is():
    assert run_ranks(keep_existing, 2) == [(True, "gloo")] * 2


def arrive_alone():
    if environment.world().rank == 1:
        return None
    process_group.ensure("cpu", timeout_s=1.0)


def test_a_missing_rank_is_an_error_in_time():
    outcomes = run_ranks(arrive_alone, 2, backend=None, check=False, timeout=30.0)
    assert outcomes[1].status == "passed"
    assert outcomes[0].status == "failed"
    assert "to join 2 processes as rank 0" in outcomes[0].text
    assert outcomes[0].seconds < 10


SCRIPT = """
import sys
import torch, torch.distributed as dist
from plait.run import process_group
device = process_group.ensure("cpu")
x = torch.ones(1)
dist.all_reduce(x)
print(f"total {x.item():g}")
if "fail" in sys.argv:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("argument", ["", "fail"])
def test_under_torchrun(pytester, argument):
    script = pytester.makepyfile(SCRIPT)
    result = pytester.run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        script,
        *([argument] if argument else []),
        timeout=60,
    )
    assert result.stdout.str().count("total 2") == 2
    assert (result.ret == 0) == (argument == "")
    assert "destroy_process_group" not in result.stderr.str()
