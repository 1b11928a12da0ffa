"""Files into records: one mapping of fields for each document, and where it stands.

| file | a record is |
|---|---|
| `.jsonl`, `.ndjson` | a line |
| `.json` | an element of the array, or a line |
| `.parquet` | a row |
| anything else | a UTF-8 text file, one of its paragraphs or lines: the field `text` |
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""What is looked for in a folder. A file that is named itself may have any suffix."""

_MOST_PROBLEMS = 8


@dataclass(frozen=True)
class Record:
    """A document before it is tokens.

    Attributes:
        file: The file it is in.
        line: Its line, row or element, from 1; None: the file is the document.
        fields: What it holds.
    """

    file: Path
    line: int | None
    fields: dict[str, Any]

    @property
    def place(self) -> str:
        """File and line, for errors."""
        return _place(self.file, self.line)


class Problems:
    """Collects what is wrong with some records, and raises it in one error.

    Args:
        asked: The error's first line.
        ways_out: Its last lines.
    """

    def __init__(self, asked: str, ways_out: Sequence[str] = ()) -> None:
        self._asked, self._ways_out = asked, ways_out
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        """Notes a problem; when there are many, raises at once."""
        self._found.append(problem)
        if len(self._found) >= _MOST_PROBLEMS:
            self._found.append("(there may be more)")
            self.raise_any()

    def raise_any(self) -> None:
        """Raises `PlaitError` if there is a problem."""
        if self._found:
            raise PlaitError(self._asked, self._found, self._ways_out)


def find(paths: Sequence[str]) -> list[Path]:
    """The files that paths mean, in an order that is the same everywhere, each once.

    Args:
        paths: Files; folders, which are searched to any depth; patterns with `*`, `?` and `**`.

    Raises:
        PlaitError: A path means no file; all such paths.
    """
    found: dict[Path, None] = {}
    problems = []
    for path in paths:
        files = _files(os.path.expanduser(path))
        if not files:
            problems.append(f"{path}: {_why_none(Path(os.path.expanduser(path)))}")
        found.update(dict.fromkeys(files))
    if problems:
        raise PlaitError(
            f"Data from {', '.join(paths)}:",
            problems,
            "give files, folders or patterns such as 'texts/**/*.txt'",
        )
    return list(found)


def read(files: Sequence[Path], text_unit: str, problems: Problems) -> Iterator[Record]:
    """The records of some files, in order.

    Args:
        files: What `find` gave.
        text_unit: What one document is in a text file: "file", "paragraph" or "line".
        problems: Takes what cannot be read.
    """
    for file in files:
        try:
            yield from _reader(file)(file, text_unit, problems)
        except UnicodeDecodeError as error:
            problems.add(f"{file}: it is not UTF-8 text (byte {error.start}: {error.reason})")
        except OSError as error:
            problems.add(f"{file}: {error.strerror or error}")


def _files(path: str) -> list[Path]:
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        wanted = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
        return sorted(x for x in place.rglob("*") if x.suffix.lower() in wanted and x.is_file())
    return sorted(x for x in map(Path, glob.glob(path, recursive=True)) if x.is_file())


def _why_none(path: Path) -> str:
    if path.is_dir():
        return f"the folder has no file with {', '.join((*TEXT_SUFFIXES, *RECORD_SUFFIXES))}"
    return "no file fits the pattern" if glob.has_magic(str(path)) else "there is no such file"


def _reader(file: Path) -> Any:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _parquet
    if suffix == ".json":
        return _json
    return _json_lines if suffix in RECORD_SUFFIXES else _text


def _text(file: Path, unit: str, problems: Problems) -> Iterator[Record]:
    if unit == "file":
        yield Record(file, None, {"text": file.read_text(encoding="utf-8-sig")})
        return
    block: list[str] = []
    start = 0
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if unit == "line" and line.strip():
                yield Record(file, number, {"text": line.rstrip("\n")})
            elif unit == "paragraph" and line.strip():
                start = start if block else number
                block.append(line)
            elif block:
                yield Record(file, start, {"text": "".join(block).rstrip("\n")})
                block = []
    if block:
        yield Record(file, start, {"text": "".join(block).rstrip("\n")})


def _json_lines(file: Path, unit: str, problems: Problems) -> Iterator[Record]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield from _record(file, number, json.loads(line), problems)
            except json.JSONDecodeError as error:
                problems.add(f"{_place(file, number)}: it is not JSON: {error.msg}")


def _json(file: Path, unit: str, problems: Problems) -> Iterator[Record]:
    content = file.read_text(encoding="utf-8-sig")
    if content.lstrip()[:1] != "[":
        yield from _json_lines(file, unit, problems)
        return
    try:
        elements = json.loads(content)
    except json.JSONDecodeError as error:
        problems.add(f"{_place(file, error.lineno)}: it is not JSON: {error.msg}")
        return
    for number, element in enumerate(elements, 1):
        yield from _record(file, number, element, problems)


def _parquet(file: Path, unit: str, problems: Problems) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                # A column is there for all rows, so what a row lacks is empty.
                yield Record(file, number, {n: x for n, x in row.items() if x is not None})
    except pyarrow.ArrowInvalid as error:
        problems.add(f"{file}: it is not a Parquet file: {error}")


def _record(file: Path, number: int, content: Any, problems: Problems) -> Iterator[Record]:
    if isinstance(content, dict):
        yield Record(file, number, content)
    else:
        problems.add(f"{_place(file, number)}: it must be an object, got {type(content).__name__}")


def _place(file: Path, line: int | None) -> str:
    return str(file) if line is None else f"{file}, line {line}"
