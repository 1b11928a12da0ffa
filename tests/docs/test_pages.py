"""Every code block of the README and the documentation runs, and shows what it really prints."""

import textwrap
from pathlib import Path

import pytest
from sybil.example import SybilFailure

from tests.docs import blocks

PAGES = sorted(
    [blocks.ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    + list((blocks.ROOT / "docs").rglob("*.md"))
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_page(page, page_folder, request):
    if page.name != "README.md":  # the README's commands start as a reader's do
        request.getfixturevalue("started_warm")
    blocks.run(page, page_folder)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("python -c 'import os, sys; print(os.getcwd() == sys.argv[1])' \"$PWD\"", "True\n"),
        (
            'python -c \'import sys; print("torch" in sys.modules, "plait" in sys.modules)\'',
            "True False\n",
        ),
        ("echo 'print(input())' >a.py; echo word | python a.py", "word\n"),
        ("python -c 'raise SystemExit(3)' || echo $?", "3\n"),
        ("python -c '1/0' 2>/dev/null || echo $?", "1\n"),
        ("python -c 'import os; os.kill(os.getpid(), 9)' || echo $?", "137\n"),
        (
            "python -c 'import time; print(1, flush=True); time.sleep(60)' & "
            "sleep 0.5; kill $!; wait $! || echo $?",
            "1\n143\n",
        ),
    ],
)
def test_commands_that_start_warm(command, printed, tmp_path, started_warm):
    run_text(f'```bash\n{command}\n```\n\n```text title="output"\n{printed}```\n', tmp_path)


def run_text(text, folder):
    page = folder / "page.md"
    page.write_text(textwrap.dedent(text))
    return blocks.run(page, folder)


def test_blocks_of_a_page_share_names_and_files(tmp_path):
    executed = run_text(
        """\
        ```python
        total = 2
        ```

        ```python title="show.py"
        print("from a file")
        ```

        1. in a list

            ```python
            print(total + 1)
            ```

            ```text title="output"
            3
            ```

        ```bash
        python show.py
        make test
        ```

        ```text title="output"
        from ...
        ```
        """,
        tmp_path,
    )
    assert executed == 4


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nassert 1 == 2\n```\n", AssertionError),
        ('```python title="x.py"\nno python\n```\n', SyntaxError),
        ("```bash\nfalse\ntrue\n```\n", SybilFailure),
        ("```bash\nmake no-such-target\n```\n", SybilFailure),
        ('```python\nprint(1)\n```\n\n```text title="output"\n2\n```\n', SybilFailure),
        ("```yaml\na: [\n```\n", Exception),
        ("```\nno language\n```\n", SybilFailure),
        ("```ruby\nputs 1\n```\n", SybilFailure),
        ("```python hl_lines=1\nx = 1\n```\n", SybilFailure),
    ],
)
def test_a_wrong_block_fails(block, error, tmp_path):
    with pytest.raises(error):
        run_text(block, tmp_path)


def test_a_block_that_hangs_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BASH_LIMIT_S", 1)
    with pytest.raises(SybilFailure, match="still running"):
        run_text("```bash\nsleep 60\n```\n", tmp_path)


def test_pages_exist():
    assert {"README.md", "index.md", "architecture.md"} <= {Path(page).name for page in PAGES}
