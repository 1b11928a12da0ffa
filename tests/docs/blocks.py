"""Runs the code blocks of a documentation page, from its top to its end.

The info string of a fence says what happens to the block; CONTRIBUTING.md has the table:

    python                  runs in this process; the blocks of a page share their names
    python title="x.py"     is written to x.py in the page's folder, for a later bash block
    bash                    runs in the page's folder, and must succeed within its time
    text title="output"     must equal what the block above it printed; `...` matches anything
    yaml                    must parse
    text, mermaid           is shown only

Anything else is an error, so that no block is left out unnoticed.
"""

import contextlib
import doctest
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).resolve().parents[2]
INFO = re.compile(r'(?P<language>[^\n ]*)(?: title="(?P<title>[^"\n]+)")?(?P<rest>[^\n]*)\n')
OUTPUT = "__output__"
BASH_LIMIT_S = 240
COMMANDS: list[Path] = []
"""Directories of programs that come before all others, for `bash` blocks (`warm.py`)."""

# Inside a page `make` is only asked whether it knows its targets: the tests run under it.
PRELUDE = f"""set -euo pipefail
make() {{ command make --no-print-directory -C '{ROOT}' -n "$@" >/dev/null; }}
"""


def parse(path: Path) -> Document:
    """Reads a page and finds the code blocks in it."""
    return Document.parse(str(path), _blocks)


def run(path: Path, folder: Path) -> int:
    """Runs a page's blocks in order in `folder`; returns how many of them were executed."""
    document = parse(path)
    document.namespace.update({"__name__": "__docs__", OUTPUT: ""})
    executed = 0
    with contextlib.chdir(folder):
        for example in document.examples():
            example.evaluate()
            executed += example.region.lexemes["language"] in ("python", "bash")
    return executed


def _blocks(document: Document) -> Iterable[Region]:
    for region in RawFencedCodeBlockLexer(INFO)(document):
        language, title = region.lexemes["language"], region.lexemes["title"]
        region.parsed = region.lexemes["source"]
        region.evaluator = _evaluator(language, title)
        if region.lexemes["rest"].strip():
            region.evaluator = _refuse
        yield region


def _evaluator(language, title):
    if language == "text":
        return _compare if title == "output" else _show
    if language == "python":
        return _write if title else _python
    return {"bash": _bash, "yaml": _yaml, "mermaid": _show}.get(language, _refuse)


def _refuse(example: Example) -> str:
    return f"no rule for a block with this info string; see {Path(__file__).name}"


def _show(example: Example) -> None:
    pass


def _yaml(example: Example) -> None:
    yaml.safe_load(example.parsed)


def _write(example: Example) -> None:
    compile(example.parsed, example.region.lexemes["title"], "exec")
    Path(example.region.lexemes["title"]).write_text(example.parsed)


def _python(example: Example) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        PythonEvaluator()(example)
    example.namespace[OUTPUT] = printed.getvalue()


def _bash(example: Example) -> str | None:
    environment = os.environ | {
        "PATH": os.pathsep.join(
            [*map(str, COMMANDS), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    started = subprocess.Popen(
        ["bash", "-c", PRELUDE + example.parsed],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, complaints = started.communicate(timeout=BASH_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        printed, complaints = started.communicate()
        return f"still running after {BASH_LIMIT_S} s\n{printed}\n{complaints}"
    example.namespace[OUTPUT] = printed
    if started.returncode:
        return f"exit status {started.returncode}\n{printed}\n{complaints}"
    return None


def _compare(example: Example) -> str | None:
    got, want = (_plain(text) for text in (example.namespace[OUTPUT], example.parsed))
    if doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        return None
    return f"the page shows:\n{want}\nthe block above it printed:\n{got}"


def _plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
