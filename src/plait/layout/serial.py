"""Configs to plain data and back: dict, JSON, YAML."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plait.errors import LayoutError
from plait.layout import checks

if TYPE_CHECKING:
    from plait.layout.config import ParallelismConfig

Config = TypeVar("Config", bound="ParallelismConfig")

BLOCK = "parallelism_config"
"""Name of the block, and prefix of the keys, that accelerate's files use."""

HANDLER_FIELDS = ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
"""Flat names that belong to `sp_handler`."""

ACCELERATE_ONLY = ("cp_comm_strategy",)
"""Settings of accelerate that say how its ring attention moves data; plait's has one way."""


def to_dict(config: "ParallelismConfig") -> dict[str, Any]:
    """Every field, handlers as dicts of their own."""
    return asdict(config)


def from_dict(cls: type[Config], data: object) -> Config:
    """A config from the dict of `to_dict`, or from any part of it.

    The flat names of `sp_handler`'s fields are understood too.

    Raises:
        LayoutError: `data` is no mapping, or names a field that does not exist.
    """
    from plait.layout.config import SequenceParallelConfig

    asked = f"{cls.__name__} from a {type(data).__name__}"
    if not isinstance(data, Mapping):
        raise LayoutError(asked, f"the fields must be a mapping, got {data!r}")
    known = [field.name for field in fields(cls)] + ["fsdp_size", *HANDLER_FIELDS]
    problems = _unknown(data, known)
    values = {str(name): value for name, value in data.items() if name in known}
    handler = values.get("sp_handler")
    flat = {name: values.pop(name) for name in HANDLER_FIELDS if name in values}
    if isinstance(handler, Mapping):
        problems += _unknown(handler, HANDLER_FIELDS, "sp_handler.")
        flat = {**{k: v for k, v in handler.items() if k in HANDLER_FIELDS}, **flat}
    if problems:
        raise LayoutError(asked, problems)
    if flat or isinstance(handler, Mapping):
        values["sp_handler"] = SequenceParallelConfig(**flat)
    return cls(**values)


def _unknown(data: Mapping[Any, Any], known: Any, prefix: str = "") -> list[str]:
    return [
        f"there is no field {prefix}{name}{checks.nearest(name, known)}"
        for name in data
        if name not in known
    ]


def to_json(config: "ParallelismConfig") -> str:
    """The fields as an indented JSON object."""
    return json.dumps(to_dict(config), indent=2)


def parse_json(text: str, source: str = "the text") -> Any:
    """The data of a JSON text, with a clear error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LayoutError(f"a layout from {source}", f"it is not JSON: {error}") from None


def to_yaml(config: "ParallelismConfig") -> str:
    """The fields as a YAML mapping, in field order."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def parse_yaml(text: str, source: str = "the text") -> Any:
    """The data of a YAML text; of an accelerate file, its `parallelism_config:` block."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LayoutError(f"a layout from {source}", f"it is not YAML: {error}") from None
    if isinstance(data, Mapping) and BLOCK in data:
        block = data[BLOCK]
        if not isinstance(block, Mapping):
            raise LayoutError(f"a layout from {source}", f"{BLOCK} must be a mapping")
        plain = {str(key).removeprefix(f"{BLOCK}_"): value for key, value in block.items()}
        return {key: value for key, value in plain.items() if key not in ACCELERATE_ONLY}
    return data


def read(path: str | Path) -> Any:
    """The data of a .json, .yaml or .yml file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"a layout from {path}", f"it cannot be read: {error}") from None
    parsers = {".json": parse_json, ".yaml": parse_yaml, ".yml": parse_yaml}
    if path.suffix not in parsers:
        raise LayoutError(f"a layout from {path}", f"{path.suffix!r} is not .json, .yaml or .yml")
    return parsers[path.suffix](text, str(path))
