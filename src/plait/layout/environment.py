"""Sizes from the PARALLELISM_CONFIG_* environment variables, under the names accelerate uses."""

import os
from collections.abc import Mapping
from typing import Any

from plait.errors import LayoutError
from plait.layout import checks
from plait.layout.serial import ACCELERATE_ONLY

PREFIX = "PARALLELISM_CONFIG_"

_INTEGERS = (
    "dp_replicate_size",
    "dp_shard_size",
    "cp_size",
    "sp_size",
    "tp_size",
    "ep_size",
    "sp_seq_length",
)
_SWITCHES = ("sp_seq_length_is_variable",)
_NAMES = ("cp_backend", "sp_backend", "sp_attn_implementation")
_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}


def settings(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields that the environment sets; nothing for those it does not.

    Args:
        environ: Where to read; None reads this process's environment.

    Returns:
        Field name → value, for `ParallelismConfig.from_dict`. Empty values count as unset.

    Raises:
        LayoutError: A variable is unknown or its value cannot be read; all are listed.
    """
    environ = os.environ if environ is None else environ
    given = {
        name.removeprefix(PREFIX).lower(): (name, value.strip())
        for name, value in environ.items()
        if name.startswith(PREFIX) and value.strip()
    }
    known = (*_INTEGERS, *_SWITCHES, *_NAMES)
    found: dict[str, Any] = {}
    problems = []
    for field, (name, text) in given.items():
        if field in ACCELERATE_ONLY:
            continue
        if field not in known:
            names = [PREFIX + other.upper() for other in known]
            problems.append(f"there is no variable {name}{checks.nearest(name, names)}")
        elif field in _INTEGERS:
            if text.lstrip("+-").isdecimal():
                found[field] = int(text)
            else:
                problems.append(f"{name}={text!r} is not an integer")
        elif field in _SWITCHES:
            if text.lower() in _WORDS:
                found[field] = _WORDS[text.lower()]
            else:
                problems.append(f"{name}={text!r} is not one of {', '.join(_WORDS)}")
        else:
            found[field] = text
    if problems:
        raise LayoutError(f"a layout from the {PREFIX}* environment variables", problems)
    return found
