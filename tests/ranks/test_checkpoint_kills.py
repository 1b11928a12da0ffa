"""A rank that is killed at any moment of a save leaves a checkpoint that loads.

`PLAIT_KILLS=1000 make tests ARGS="tests/ranks/test_checkpoint_kills.py"` tries every moment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("checkpoint_kills.py")
MOST = int(os.environ.get("PLAIT_KILLS", "0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "points", "form"),
    [(1, 14, "waiting"), (2, 2, "waiting"), (2, 1, "asynchronous")],
)
def test_the_latest_checkpoint_loads(
    num_ranks: int, points: int, form: str, tmp_path: Path
) -> None:
    seconds = 3000 if MOST else 8
    told = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, str(num_ranks), str(MOST or points), form, str(seconds)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "QUIET": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=seconds + 200,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    assert json.loads(told.stdout.splitlines()[-1])["killed"] >= 3
