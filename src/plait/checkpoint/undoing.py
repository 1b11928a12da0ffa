"""What a load gives to objects of the user's, which may refuse it, and how they get back theirs."""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.checkpoint import randomness


@dataclass(frozen=True)
class Before:
    """What there was before a load.

    Attributes:
        objects: The scheduler and the data: each with its attributes and a copy of its state.
        groups: The groups of the optimizer with their settings, which a scheduler may change.
        modules: The modules with a state of their own: each with its attributes and that state.
        random: The random number generators.
    """

    objects: list[tuple[Any, dict[str, Any], Any]]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    modules: list[tuple[nn.Module, dict[str, Any], Any]]
    random: dict[str, Any]


def remember(model: nn.Module, given: Mapping[str, Any]) -> Before:
    """Notes what `put_back` brings back; small things, no parameter is copied."""
    things = [given[what] for what in ("scheduler", "data") if given[what] is not None]
    groups = [] if given["optimizer"] is None else given["optimizer"].param_groups
    own = nn.Module.get_extra_state
    return Before(
        [(x, dict(getattr(x, "__dict__", {})), copy.deepcopy(x.state_dict())) for x in things],
        [(group, dict(group)) for group in groups],
        [
            (module, dict(module.__dict__), copy.deepcopy(module.get_extra_state()))
            for module in model.modules()
            if getattr(type(module), "get_extra_state", own) is not own
        ],
        randomness.capture(),
    )


def put_back(before: Before) -> None:
    """Gives all of them back what they had, as far as they take it."""
    for thing, attributes, state in before.objects:
        _attributes(thing, attributes)
        with contextlib.suppress(Exception):  # the refusal itself is what is to be told
            thing.load_state_dict(state)
    for module, attributes, state in before.modules:
        _attributes(module, attributes)
        with contextlib.suppress(Exception):
            module.set_extra_state(state)
    for group, settings in before.groups:
        group.clear()
        group.update(settings)
    randomness.restore(before.random)


def _attributes(thing: Any, attributes: dict[str, Any]) -> None:
    if hasattr(thing, "__dict__"):
        thing.__dict__.clear()
        thing.__dict__.update(attributes)
