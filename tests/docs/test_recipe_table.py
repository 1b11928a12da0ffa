"""The table of a recipe's keys in the documentation is what the code says."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from plait.train.recipe import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"


def shown(value: Any) -> str:
    """A default as the page writes it: as YAML would."""
    return value if isinstance(value, str) else json.dumps(value)


def test_keys_defaults_and_meanings_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `(.*?)` \| (.*?) \|$", PAGE.read_text(), re.M)
    assert len(rows) > 30
    expected = []
    for section, kind in SECTIONS.items():
        defaults = kind()
        for field in dataclasses.fields(kind):
            value = shown(getattr(defaults, field.name))
            expected.append((f"{section}.{field.name}", value, field.metadata["meaning"]))
    assert rows == expected
