"""The pages name files and functions that exist."""

import re

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_pages import PAGES

PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./*-]+)`")
SECTION = re.compile(r"^## \d\. `(src/[\w/.]+)`", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page):
    missing = [path for path in PATH.findall(page.read_text()) if not list(ROOT.glob(path))]
    assert missing == []


def test_reading_guide_names_what_is_there():
    text = (ROOT / "docs/reading-tp.md").read_text()
    starts = list(SECTION.finditer(text))
    assert len(starts) == 5
    ends = [*(section.start() for section in starts[1:]), text.index("## Then")]
    for start, end in zip(starts, ends, strict=True):
        folder = (ROOT / start[1]).parent
        source = "".join(file.read_text() for file in folder.glob("*.py"))
        bullets = re.findall(r"^- `(\w+)`(?: and `(\w+)`)?", text[start.end() : end], re.MULTILINE)
        for name in filter(None, sum(bullets, ())):
            assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), (start[1], name)
