"""A recipe: everything that `plait train` is told, in one value that can be written and read.

It comes from a YAML file, from flags, or from both, where flags win. All of it is checked before
anything is read, and all that is wrong goes into one error.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from plait.errors import PlaitError
from plait.layout import checks
from plait.train.recipe_fields import (
    Data,
    Layout,
    Lora,
    Optimizer,
    Reports,
    Training,
    setting,
    text,
)

SECTIONS: dict[str, type] = {
    "data": Data,
    "layout": Layout,
    "train": Training,
    "optimizer": Optimizer,
    "lora": Lora,
    "reports": Reports,
}
"""The blocks of a recipe. Above them stand `model` and `output`."""

RECIPE = "recipe.yaml"
"""Name of the recipe in the output directory."""

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run; each section's class documents its keys.

    Args:
        model: Directory, GGUF file, or name on the hub.
        output: Where the model, checkpoints, log and pictures go.
        data: Files, and how they become rows.
        layout: The ranks.
        train: Length, batch, precision.
        optimizer: AdamW and its schedule.
        lora: Adapters, in the place of all weights.
        reports: Log, evaluation, checkpoints, pictures.
    """

    model: str = setting(text, "directory, GGUF file, or name on the hub")
    output: str = setting(text, "where model, checkpoints, log and pictures go", "trained")
    data: Data = field(default_factory=Data)
    layout: Layout = field(default_factory=Layout)
    train: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora = field(default_factory=Lora)
    reports: Reports = field(default_factory=Reports)

    @property
    def rows_per_step(self) -> int:
        """Rows of the global batch of one optimizer step."""
        return self.train.batch_size * self.train.accumulate * self.layout.num_data_ranks

    @classmethod
    def from_dict(cls, data: Any, asked: str = "The recipe:") -> Self:
        """A recipe from nested plain data; what is not there keeps its default.

        Raises:
            PlaitError: Unknown keys, with the nearest names, and values that cannot be; all of
                them.
        """
        problems: list[str] = []
        if not isinstance(data, Mapping):
            raise PlaitError(asked, f"it must be a mapping of keys, got {data!r}", _WAY)
        known = ["model", "output", *SECTIONS]
        problems += _unknown(data, known, "")
        values = _checked(cls, data, ("model", "output"), "", problems)
        for name, section in SECTIONS.items():
            block = data.get(name)
            block = {} if block is None else block
            if not isinstance(block, Mapping):
                problems.append(f"{name} must be a block of keys, got {block!r}")
                continue
            keys = [key.name for key in dataclasses.fields(section)]
            problems += _unknown(block, keys, f"{name}.")
            found = _checked(section, block, keys, f"{name}.", problems)
            values[name] = section(**found)
        problems += _missing(values)
        if problems:
            raise PlaitError(asked, problems, _WAY)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every key as plain data, as YAML and JSON can hold it."""
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """Every key as YAML, in the order of the sections."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def read(path: Path) -> dict[str, Any]:
    """The plain data of a recipe file.

    Raises:
        PlaitError: It cannot be read, or is no YAML mapping.
    """
    import yaml

    asked = f"The recipe {path}:"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlaitError(asked, f"it cannot be read: {error}", _WAY) from None
    except yaml.YAMLError as error:
        raise PlaitError(asked, f"it is not YAML: {error}", _WAY) from None
    if not isinstance(data, dict):
        raise PlaitError(asked, f"it must be a mapping of keys, got {data!r}", _WAY)
    return data


def is_recipe(path: str) -> bool:
    """Whether a path names a recipe rather than a model."""
    return path.endswith(SUFFIXES)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`, which are dotted: `{"optimizer.lr": 1e-4}`.

    Raises:
        PlaitError: A dotted key has more than two parts, or names a section as if it were a key.
    """
    result: dict[str, Any] = {
        name: dict(x) if isinstance(x, Mapping) else x for name, x in base.items()
    }
    for dotted, value in over.items():
        section, _, key = dotted.rpartition(".")
        if "." in section or (not section and key in SECTIONS):
            sections = ", ".join(SECTIONS)
            raise PlaitError(
                f"The setting {dotted}:", f"it is no key; keys are model, output and {sections}.KEY"
            )
        if not section:
            result[key] = value
            continue
        block = result.get(section)
        result[section] = {**(block if isinstance(block, dict) else {}), key: value}
    return result


def parse_assignment(assignment: str) -> tuple[str, Any]:
    """The dotted key and the value of `KEY=VALUE`, the value read as YAML.

    Raises:
        PlaitError: There is no `=`, no key, or the value is not YAML.
    """
    import yaml

    key, equals, value = assignment.partition("=")
    asked = f"The setting {assignment!r}:"
    if not equals or not key.strip():
        raise PlaitError(asked, "it is not of the form KEY=VALUE", "optimizer.schedule=linear")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise PlaitError(asked, f"the value is not YAML: {error}") from None


_WAY = "the how-to about training lists every key: docs/how-to/train.md"


def _unknown(block: Mapping[Any, Any], known: list[str], prefix: str) -> list[str]:
    problems = []
    for name in block:
        if name in known:
            continue
        # A key may stand in the wrong section, so the names of all of them are near.
        homes = {
            f"{home}.{key.name}"
            for home, section in SECTIONS.items()
            for key in dataclasses.fields(section)
            if key.name == name
        }
        near = f" (it is {' or '.join(sorted(homes))})" if homes else checks.nearest(name, known)
        problems.append(f"there is no key {prefix}{name}{near}")
    return problems


def _checked(
    owner: type, block: Mapping[str, Any], names: Any, prefix: str, problems: list[str]
) -> dict[str, Any]:
    """The values of `names`, in their form; what is wrong is added to `problems`."""
    found: dict[str, Any] = {}
    by_name = {key.name: key for key in dataclasses.fields(owner)}
    for name in names:
        if name not in block:
            continue
        try:
            found[name] = by_name[name].metadata["check"](block[name])
        except ValueError as error:
            problems.append(f"{prefix}{name} {error}")
    return found


def _missing(values: Mapping[str, Any]) -> list[str]:
    problems = []
    if not values.get("model"):
        problems.append("no model is named: a directory, a GGUF file or a name on the hub")
    data = values.get("data")
    if data is not None and not data.train:
        problems.append("no files to learn from are named: data.train")
    return problems


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value
