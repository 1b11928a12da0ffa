"""Documents of tokens on disk: made once, kept, and read again without being copied to memory."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import PlaitError
from plait.run import environment
from plait.train import text
from plait.train.packing import IGNORED
from plait.train.recipe_fields import Data
from plait.train.text_tokens import Encoder

_FORM = 1
"""Changes with everything that changes what is kept."""


class TokenDocuments:
    """Documents in an Arrow file, memory-mapped by `datasets`.

    A document whose tokens are all labels has an empty list in the column `learned`.

    Args:
        file: What [`prepare`][plait.train.text_data.prepare] has written.
    """

    def __init__(self, file: Path) -> None:
        self.dataset = _datasets().Dataset.from_file(str(file))
        columns = self.dataset.data
        self._ids = _flat(columns.column("input_ids"))
        self._learned = _flat(columns.column("learned"))
        sizes = [np.diff(starts) for _, starts in self._ids]
        self.lengths = np.concatenate([*sizes, np.zeros(0, np.int64)])
        self._first = np.cumsum([0, *map(len, sizes)])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def masked(self) -> bool:
        """Whether there are documents some of whose tokens are no labels."""
        return any(starts[-1] > starts[0] for _, starts in self._learned)

    def piece(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels of a part of a document, `[stop - start]` each."""
        chunk = int(np.searchsorted(self._first, document, side="right")) - 1
        row = document - int(self._first[chunk])
        ids = _list(self._ids[chunk], row)[start:stop]
        learned = _list(self._learned[chunk], row)[start:stop]
        return ids, np.where(learned != 0, ids, IGNORED) if len(learned) else ids


@dataclass(frozen=True)
class Split:
    """Documents to learn from and to evaluate on.

    Attributes:
        train: Documents to learn from.
        train_order: Their numbers, in the order in which they are laid down.
        evaluation: Documents to evaluate on, or None.
        evaluation_order: Their numbers.
    """

    train: TokenDocuments
    train_order: list[int]
    evaluation: TokenDocuments | None
    evaluation_order: list[int]


def prepare(paths: Sequence[str], tokenizer: Any, options: Data) -> TokenDocuments:
    """The documents of some files as tokens; from the cache, where they are in it.

    The cache is in the folder `tokens` of plait's cache directory. Its key covers the files' names,
    sizes and times, the tokenizer and the options, so that it need not be looked after.

    Args:
        paths: Files, folders, patterns.
        tokenizer: The model's.
        options: How documents become tokens.

    Raises:
        PlaitError: `datasets` is missing; a path means no file; files and lines that cannot be
            used, each with its field.
    """
    _datasets()
    files = text.find(paths)
    key = _key(files, tokenizer, options)
    kept = environment.cache_directory() / "tokens" / f"{key}.arrow"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        _write(kept, files, tokenizer, options)
    return TokenDocuments(kept)


def split(data: Data, tokenizer: Any, seed: int) -> Split:
    """The documents of a recipe.

    Args:
        data: The recipe's section.
        tokenizer: The model's.
        seed: Decides the order of the documents, and which of them are for evaluation.

    Raises:
        PlaitError: As `prepare`; there is no document; too few to keep some for evaluation.
    """
    train = prepare(data.train, tokenizer, data)
    _refuse_empty(train, data.train)
    order = np.random.default_rng(seed).permutation(len(train)).tolist()
    held_back = 0
    if isinstance(data.eval, float):
        held_back = max(1, round(data.eval * len(train)))
        if held_back >= len(train):
            raise PlaitError(
                f"data.eval: {data.eval:g} of the documents for evaluation.",
                f"there are {len(train)} document(s) in all",
                ("data.text_unit: paragraph makes more of a text file", "data.eval: a file"),
            )
    kept, rest = order[:held_back], order[held_back:]
    if not data.shuffle:
        kept, rest = sorted(kept), sorted(rest)
    if held_back:
        return Split(train, rest, train, kept)
    if isinstance(data.eval, tuple):
        evaluation = prepare(data.eval, tokenizer, data)
        _refuse_empty(evaluation, data.eval)
        return Split(train, rest, evaluation, list(range(len(evaluation))))
    return Split(train, rest, None, [])


def packing_of(data: Data, documents: TokenDocuments) -> str:
    """The way of filling rows that a recipe means for these documents."""
    if data.packing != "auto":
        return data.packing
    return "whole" if documents.masked else "cut"


def _write(file: Path, files: Sequence[Path], tokenizer: Any, options: Data) -> None:
    """Writes the documents beside `file` and puts them in its place when all is well."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    if options.end_token and tokenizer.eos_token_id is None:
        raise PlaitError(
            "data.end_token: true:", "the tokenizer has no end token", "data.end_token: false"
        )
    problems = text.Problems(
        f"Data from {', '.join(options.train)}:",
        ("mend or leave out what is named", "data.fields: {text: NAME} says how a field is called"),
    )
    records = text.read(files, options.text_unit, problems)
    encoder = Encoder(tokenizer, options.learn, options.fields, options.end_token)
    kinds = {"input_ids": "int32", "learned": "uint8"}
    features = Features({name: List(Value(kind)) for name, kind in kinds.items()})
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        written = Path(folder, file.name)
        with ArrowWriter(path=str(written), features=features) as writer:
            for made in encoder.encode(records, problems):
                writer.write({"input_ids": made.ids, "learned": made.learned or []})
            problems.raise_any()
            writer.finalize()
        os.replace(written, file)


def _flat(column: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The values of a column of lists, and where each list starts and ends, by chunk."""
    return [
        (chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy().astype(np.int64))
        for chunk in column.chunks
    ]


def _list(chunk: tuple[np.ndarray, np.ndarray], row: int) -> np.ndarray:
    values, starts = chunk
    return values[starts[row] : starts[row + 1]]


def _key(files: Sequence[Path], tokenizer: Any, options: Data) -> str:
    stats = [(file.resolve(), file.stat()) for file in files]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = {
        "form": _FORM,
        "files": [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats],
        "tokenizer": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab()),
        "end": tokenizer.eos_token_id,
        "template": str(getattr(tokenizer, "chat_template", None)),
        "options": [options.learn, options.fields, options.text_unit, options.end_token],
    }
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _refuse_empty(documents: TokenDocuments, paths: Sequence[str]) -> None:
    if not len(documents):
        raise PlaitError(
            f"Data from {', '.join(paths)}:", "the files hold no text", "give files with a text"
        )


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise PlaitError(
            "Reading data to learn from.",
            "it needs the package datasets, which is not installed",
            "pip install 'plait[train]'",
        ) from None
    datasets.disable_progress_bars()
    return datasets
