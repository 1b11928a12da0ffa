"""Configs, plans and help texts cost no import of torch or transformers."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "gguf", "matplotlib")


@pytest.mark.parametrize(
    "code",
    [
        "import plait",
        "import plait.errors, plait.layout, plait.shapes, plait.plan, plait.run",
        "import plait; plait.DistributedConfig(tp_size=2).resolve(2)",
        "import plait.testing.plugin",
    ],
)
def test_no_heavy_import(code):
    check = f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


def test_a_heavy_import_would_be_seen():
    check = f"import sys, numpy\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "['numpy']"
