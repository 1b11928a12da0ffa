"""Rules: patterns over module and parameter names, and how two sets of them merge.

A pattern is a dotted name in which a part that is exactly `*` stands for one whole numeric part
(a layer or expert number). `layers.*.mlp` matches `layers.0.mlp` and `layers.10.mlp`; nothing in a
pattern ever matches a digit inside a word, so `w1` is a name like any other.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

LAYER_NUMBER = "*"


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = [r"\d+" if part == LAYER_NUMBER else re.escape(part) for part in pattern.split(".")]
    return re.compile(r"\.".join(parts))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names `name` as a whole.

    >>> matches("layers.*.mlp", "layers.10.mlp")
    True
    >>> matches("layers.*.mlp", "layers.10.mlp.w1")
    False
    """
    return _compiled(pattern).fullmatch(name) is not None


def generalize(name: str) -> str:
    """The pattern of a concrete name: every numeric part becomes `*`.

    >>> generalize("layers.10.mlp.w1")
    'layers.*.mlp.w1'
    """
    return ".".join(LAYER_NUMBER if part.isdigit() else part for part in name.split("."))


def specificity(pattern: str) -> int:
    """Number of `*` parts, negated: of two patterns that match a name the greater one decides."""
    return -sum(part == LAYER_NUMBER for part in pattern.split("."))


def full_pattern(pattern: str, names: Iterable[str], base_prefix: str) -> str | None:
    """The form of `pattern` that matches something in `names`.

    Args:
        pattern: As the user wrote it: relative to the whole model or to its base model.
        names: All module and parameter names.
        base_prefix: Name of the base model inside the model, or `""`.

    Returns:
        `pattern`, or `base_prefix.pattern`, or `pattern` without the prefix (a plan written for the
        whole model, used on the base model), or None where none of them matches.
    """
    known = list(names)
    candidates = [pattern]
    if base_prefix:
        candidates += [f"{base_prefix}.{pattern}", pattern.removeprefix(f"{base_prefix}.")]
    for candidate in candidates:
        if any(matches(candidate, name) for name in known):
            return candidate
    return None


def merge(base: Mapping[str, str], override: Mapping[str, str]) -> dict[str, str]:
    """`base` with single rules replaced or added by `override`; an empty override applies none.

    Args:
        base: The model's own rules, full names.
        override: The user's rules, full names.

    Returns:
        The merged rules. The user's come last, in the order given.
    """
    if not override:
        return {}
    return {k: v for k, v in base.items() if k not in override} | dict(override)
