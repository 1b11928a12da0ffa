"""What the pool does when a rank fails, dies or hangs, and that it works afterwards."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.errors import RankError
from plait.testing import jobs, reports, run_ranks


def total(x):
    y = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(y)
    return y.item()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("one over nothing")
    dist.barrier()


def die_on_rank_one(how):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(7)
    wait_for_the_lost_rank()


def wait_for_the_lost_rank():
    while True:
        time.sleep(0.05)


def hang_on_rank_zero():
    if dist.get_rank() == 0:
        wait_for_the_lost_rank()


def refuse_everywhere():
    raise RankError("a sum", "shapes differ", rank=1)


def return_something_unpicklable():
    return lambda: None


def no_collective_on_rank_one():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), 0, async_op=True)


def read_environment():
    return {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "EXTRA")}


def join_like_torchrun():
    dist.init_process_group("gloo")
    result = total(0)
    dist.destroy_process_group()
    return result


def job(fn):
    return jobs.Job(__name__, __file__, fn.__name__, group=None, wants_value=True)


def run(pool, fn, n, *args, timeout_s=20.0):
    started = time.monotonic()
    outcomes = pool.run(job(fn), n, args, timeout_s=timeout_s)
    return outcomes, time.monotonic() - started


def works(pool, n):
    return [outcome.value for outcome in run(pool, total, n, 1)[0]] == [sum(range(1, n + 1))] * n


def test_failing_rank_is_named_with_its_traceback(rank_pool):
    assert works(rank_pool, 2)
    outcomes, seconds = run(rank_pool, fail_on_rank_one, 2)
    assert [outcome.status for outcome in outcomes] in (["stopped", "failed"], ["failed"] * 2)
    assert 1 in reports.failed_ranks(outcomes)
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    report = reports.describe(outcomes)
    assert "─── rank 1 ───" in report
    assert "raise ZeroDivisionError" in report
    assert "worker.py" not in outcomes[1].text
    assert seconds < 10
    assert works(rank_pool, 2)


@pytest.mark.parametrize(("how", "ending"), [("kill", "SIGKILL"), ("exit", "exit code 7")])
def test_dying_rank_is_named_and_replaced(rank_pool, how, ending):
    assert works(rank_pool, 3)
    before = rank_pool.pids
    outcomes, seconds = run(rank_pool, die_on_rank_one, 3, how)
    assert [outcome.status for outcome in outcomes] == ["stopped", "died", "stopped"]
    assert ending in outcomes[1].summary
    assert "wait_for_the_lost_rank" in outcomes[0].stack
    assert "wait_for_the_lost_rank" in outcomes[2].stack
    assert seconds < 10
    assert works(rank_pool, 3)
    assert not set(before) & set(rank_pool.pids)


def test_hang_ends_at_its_limit_with_stacks(rank_pool):
    assert works(rank_pool, 2)
    outcomes, seconds = run(rank_pool, hang_on_rank_zero, 2, timeout_s=3.0)
    assert [outcome.status for outcome in outcomes] == ["hung", "passed"]
    assert 3.0 <= seconds < 10.0
    assert "3 s" in outcomes[0].summary
    assert "wait_for_the_lost_rank" in reports.describe(outcomes)
    assert works(rank_pool, 2)


def test_ranks_out_of_step_are_replaced(rank_pool):
    assert works(rank_pool, 2)
    outcomes, _ = run(rank_pool, no_collective_on_rank_one, 2)
    assert [outcome.status for outcome in outcomes] == ["passed", "passed"]
    assert rank_pool.pids == []
    assert works(rank_pool, 2)


def test_group_sizes_change_without_new_workers(rank_pool):
    for n in (4, 2, 3, 1, 4):
        assert works(rank_pool, n)
    assert rank_pool.num_starts == 4


def test_worker_lost_between_jobs_is_replaced(rank_pool):
    assert works(rank_pool, 2)
    lost = rank_pool.pids[0]
    os.kill(lost, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{lost}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert works(rank_pool, 2)


def test_value_that_cannot_be_sent_is_a_failure(rank_pool):
    outcomes, _ = run(rank_pool, return_something_unpicklable, 1)
    assert outcomes[0].status == "failed"
    assert "cannot be sent" in outcomes[0].summary


def test_run_ranks_returns_values_in_rank_order():
    assert run_ranks(total, 3, 1) == [6.0, 6.0, 6.0]
    assert run_ranks(dist.get_rank, 3) == [0, 1, 2]


def test_run_ranks_raises_with_the_rank():
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        run_ranks(fail_on_rank_one, 2)
    assert caught.value.rank == 1 or isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RankError, match="shapes differ") as caught:
        run_ranks(refuse_everywhere, 2)
    assert isinstance(caught.value.__cause__, RankError)
    assert caught.value.__cause__.rank == 1


def test_run_ranks_without_check_returns_outcomes():
    outcomes = run_ranks(die_on_rank_one, 2, "kill", check=False)
    assert [outcome.status for outcome in outcomes] == ["stopped", "died"]


def test_run_ranks_can_leave_the_group_to_the_function():
    found = run_ranks(read_environment, 2, backend=None, env={"EXTRA": "x"})
    assert [one["RANK"] for one in found] == ["0", "1"]
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"] != "0"
    assert run_ranks(join_like_torchrun, 2, backend=None) == [1.0, 1.0]


def test_run_ranks_refuses_a_local_function():
    with pytest.raises(ValueError, match="local to a function"):
        run_ranks(lambda: None, 2)


FAILING = """
import time
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
def test_compare(rank):
    print("hello from", rank)
    value = {"key": 41 + rank}
    assert value["key"] == 41

@pytest.mark.ranks(2, timeout=1)
def test_hang(rank):
    while rank == 1:
        time.sleep(0.05)

@pytest.mark.ranks(2)
def test_unpicklable(opened):
    pass

@pytest.fixture
def opened():
    return (x for x in "abc")

@pytest.mark.ranks(2)
def test_afterwards():
    dist.barrier()

@pytest.mark.ranks(2)
def test_skipping():
    pytest.skip("the ranks decided")
"""


def test_report_of_the_plugin(pytester):
    pytester.makepyfile(test_failing_inner=FAILING)
    result = pytester.runpytest("-p", "no:cacheprovider", "-rA")
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    text = result.stdout.str()
    assert "the ranks decided" in text
    assert "rank 1 of 2 failed" in text
    assert "AssertionError: assert 42 == 41" in text
    assert 'assert value["key"] == 41' in text
    assert "output of rank 1" in text
    assert "hello from 1" in text
    assert "did not finish within 1 s" in text
    assert "in test_hang" in text
    assert "the value of `opened` (generator) cannot be pickled" in text


ORDER = """
import pytest

@pytest.mark.ranks(3, 2)
def test_a(): pass

@pytest.mark.ranks(2)
def test_b(): pass

def test_plain(): pass
"""


def test_order_and_selection(pytester):
    pytester.makepyfile(test_order_inner=ORDER)
    lines = pytester.runpytest("--collect-only", "-q").stdout.str().splitlines()
    names = [line.split("::")[1] for line in lines if "::" in line]
    assert names == ["test_plain", "test_a[2ranks]", "test_b[2ranks]", "test_a[3ranks]"]


def test_bad_world_size_is_refused(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.ranks(0)\ndef test_a(): pass\n")
    result = pytester.runpytest()
    assert "must be positive integers" in result.stdout.str() + result.stderr.str()


if __name__ == "__main__":  # run as a script: a function of the script itself is found again
    sys.stdout.write(repr(run_ranks(total, 2, 1)))


def test_run_ranks_from_a_script(pytester):
    result = pytester.runpython(__file__)
    assert result.stdout.str().strip() == "[3.0, 3.0]"
