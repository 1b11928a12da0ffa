"""The names, classes and shapes of a module, as the plan room wants them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.plan import ModelNames
from plait.styles.code import reads


def names_of(module: nn.Module) -> ModelNames:
    """Names, classes and shapes of a module, as the plan room wants them."""
    params: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for owner, part in module.named_modules():
        for local_name, param in part.named_parameters(recurse=False):
            name = f"{owner}.{local_name}" if owner else local_name
            params[name], owners[name] = tuple(param.shape), owner
            if id(param) in first:
                tied[name] = first[id(param)]
            else:
                first[id(param)] = name
    prefix = getattr(module, "base_model_prefix", "") or ""
    has_base = bool(prefix) and isinstance(getattr(module, prefix, None), nn.Module)
    return ModelNames(
        modules={name: _kind(part) for name, part in module.named_modules()},
        params=params,
        owners=owners,
        tied=tied,
        base_prefix=prefix if has_base else "",
        model=type(module).__name__,
        facts=_facts(module),
    )


def _kind(part: nn.Module) -> str:
    """The class of a module by name; subclasses of the two that styles know count as these."""
    for known in (nn.Embedding, nn.Linear):
        if isinstance(part, known):
            return known.__name__
    return type(part).__name__


def _facts(module: nn.Module) -> dict[str, Mapping[str, int]]:
    """The integers of every module and, once for each config, those of its config."""
    facts: dict[str, Mapping[str, int]] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        kind: Any = type(part)
        found = _integers(vars(part)) | {f"reads.{child}": 1 for child in reads(kind)}
        config = vars(part).get("config")
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            values = _config_values(config)
            if name:
                found |= {f"config.{key}": value for key, value in _integers(values).items()}
            else:
                found = _root_facts(values) | found
        if found:
            facts[name] = found
    return facts


def _root_facts(values: Mapping[str, Any]) -> dict[str, int]:
    facts = _integers(values)
    for key, value in values.items():
        if hasattr(value, "__dict__") and hasattr(value, "to_dict"):
            facts |= {f"{key}.{k}": v for k, v in _integers(_config_values(value)).items()}
    return facts


def _config_values(config: Any) -> dict[str, Any]:
    """The attributes of a config, also under the common names that it maps to its own."""
    values = dict(getattr(config, "__dict__", {}))
    aliases = getattr(config, "attribute_map", None) or {}
    return values | {a: values[own] for a, own in aliases.items() if own in values}


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: int(value)
        for name, value in values.items()
        if isinstance(value, int) and not name.startswith("_") and name != "training"
    }
