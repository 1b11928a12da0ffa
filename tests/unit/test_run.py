"""Where the process stands, which device it takes, seeds and reports, in one process."""

import logging
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plait.errors import LayoutError
from plait.run import device, environment, process_group, progress, seeds


def refusal(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def test_ordinary_process():
    place = environment.world({})
    assert place == environment.World(0, 1, 0, launched=False)
    assert place.num_processes is None
    assert environment.world({"LOCAL_RANK": "3"}) == place


def test_launched_process():
    place = environment.world({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert place == environment.World(5, 8, 1, launched=True)
    assert place.num_processes == 8
    assert environment.world({"RANK": "0", "WORLD_SIZE": "1"}).launched
    assert environment.world({"RANK": "3", "WORLD_SIZE": "4"}).local_rank == 3


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be an integer"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE must be an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
    ],
)
def test_broken_environment_is_refused(variables, part):
    text = refusal(lambda: environment.world(variables))
    assert part in text
    assert "torchrun" in text


def test_environment_needs_no_torch():
    code = (
        "import plait.run.environment as e, plait.run.progress, sys; "
        "e.world(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ensure_without_a_launcher_initialises_nothing():
    assert process_group.ensure("cpu") == torch.device("cpu")
    assert not dist.is_initialized()


def fake_cuda(monkeypatch, num_devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)


def test_devices(monkeypatch):
    assert device.for_rank("cpu", 7) == torch.device("cpu")
    assert "neither 'cpu' nor 'cuda'" in refusal(lambda: device.for_rank("tpu", 0))
    fake_cuda(monkeypatch, 0)
    assert device.default_type() == "cpu"
    assert "no CUDA device" in refusal(lambda: device.for_rank("cuda", 0))
    fake_cuda(monkeypatch, 2)
    assert device.default_type() == "cuda"
    assert device.for_rank("cuda", 1) == torch.device("cuda", 1)
    text = refusal(lambda: device.for_rank("cuda", 2))
    assert "local rank 2" in text
    assert "2 CUDA device(s)" in text


@pytest.fixture
def recorded(monkeypatch):
    """A launcher's environment for CUDA, with the calls that would touch devices recorded."""
    calls = {}
    fake_cuda(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.setdefault("device", d))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kwargs: calls.update(args=args, **kwargs)
    )
    monkeypatch.setattr(process_group.atexit, "register", lambda f: calls.setdefault("exit", f))
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    return calls


def test_cuda_ranks_join_nccl_and_gloo_on_their_own_device(recorded):
    assert process_group.ensure() == torch.device("cuda", 2)
    assert recorded["args"] == ("cpu:gloo,cuda:nccl",)
    assert recorded["device"] == recorded["device_id"] == torch.device("cuda", 2)
    assert recorded["timeout"].total_seconds() == process_group.TIMEOUT_S
    assert recorded["exit"] is process_group.leave


def test_missing_rendezvous_is_explained(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = refusal(lambda: process_group.ensure("cpu"))
    assert "MASTER_ADDR" in text
    assert "torchrun" in text


def test_leaving_is_quiet_and_skipped_after_an_error(monkeypatch):
    left = []

    def destroy():
        left.append(True)
        raise RuntimeError("peer gone")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    process_group.leave()
    assert left == [True]
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    process_group.leave()
    assert left == [True]


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_seeds():
    seeds.set_all(3)
    first = draws()
    seeds.set_all(3)
    assert draws() == first
    seeds.set_all(4)
    assert draws() != first


def test_borrowed_generators_are_given_back():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with seeds.borrowed(5):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeds.borrowed(5):
        assert torch.equal(torch.rand(2), inside)
    torch.manual_seed(0)
    with seeds.borrowed():
        assert torch.equal(torch.rand(2), expected)


@pytest.fixture
def logger(monkeypatch):
    """The logger "plait" as a fresh process has it."""
    found = progress.LOGGER
    monkeypatch.setattr(found, "handlers", [])
    monkeypatch.setattr(found, "level", logging.NOTSET)
    monkeypatch.setattr(found, "_cache", {})
    return found


def at_rank(monkeypatch, rank):
    place = environment.World(rank, 4, rank, launched=True)
    monkeypatch.setattr(environment, "world", lambda: place)


def test_reports_come_from_rank_zero(monkeypatch, logger, caplog):
    at_rank(monkeypatch, 1)
    progress.report("loaded")
    assert caplog.text == ""
    progress.report("loaded", all_ranks=True)
    assert "[rank 1] loaded" in caplog.text
    at_rank(monkeypatch, 0)
    progress.report("read 5 %s")
    assert "read 5 %s" in caplog.text


def test_reports_are_shown_without_any_logging_set_up(tmp_path):
    code = "from plait.run.progress import report; report('one line'); report('two')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "one line\ntwo\n"
    code = f"import logging; logging.basicConfig(format='app %(message)s'); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "app one line\napp two\n"
    code = f"import logging; logging.getLogger('plait').setLevel('WARNING'); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_bar_on_a_terminal_and_elsewhere(monkeypatch, logger, capsys):
    with progress.bar("reading", 10, "B") as advance:
        advance(10)
    assert capsys.readouterr().err == ""
    terminal = types.SimpleNamespace(
        **{name: getattr(sys.stderr, name) for name in ("write", "flush")}
    )
    terminal.isatty = lambda: True
    terminal.encoding = "utf-8"
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.bar("reading", 2000, "B") as advance:
        advance(1000)
    assert "reading" in capsys.readouterr().err
    at_rank(monkeypatch, 1)
    with progress.bar("reading", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_stopwatch():
    watch = progress.Stopwatch()
    assert 0 <= watch.seconds < 60
    assert watch.seconds >= 0
