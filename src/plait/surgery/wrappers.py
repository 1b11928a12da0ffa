"""Modules that others put around split layers, such as adapters, and what is theirs.

A library that adds adapters exchanges a layer for one of its own that holds the layer under another
name. The plan goes on naming the place where the layer was; here both are brought together. Who
knows such a library registers a [`Wrapper`][plait.surgery.wrappers.Wrapper].
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from plait.state import ParallelState
from plait.styles import TensorParallelLayer


class Wrapper(Protocol):
    """What is known of one kind of wrapping modules."""

    def inner(self, part: nn.Module) -> str | None:
        """The attribute under which `part` keeps the layer that it wraps; None: it is none."""

    def styles(
        self, part: nn.Module, name: str, state: ParallelState
    ) -> Mapping[str, TensorParallelLayer]:
        """The styles of the modules of its own that hold parameters, by their names in `part`.

        Modules that are left out are whole on every rank.

        Raises:
            PlanError: It cannot work on the layer as it is split. Nothing has been changed.
        """

    def finish(self, part: nn.Module, root: nn.Module, state: ParallelState) -> None:
        """Called when the parameters of `part`, somewhere in `root`, are in place, maybe again."""


KNOWN: list[Wrapper] = []
"""Those that are registered."""


@dataclass
class Wrapped:
    """The wrapping modules in a model.

    Attributes:
        places: Name that the plan knows → name that the module has now.
        parts: Wrapping module by name, with what is known of it.
        own: Names of modules that belong to them.
    """

    places: dict[str, str] = field(default_factory=dict)
    parts: dict[str, tuple[nn.Module, Wrapper]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def styles(self, state: ParallelState) -> dict[str, TensorParallelLayer]:
        """The styles of their modules, by full name.

        Raises:
            PlanError: One of them cannot work on its layer as it is split.
        """
        found: dict[str, TensorParallelLayer] = {}
        for name, (part, wrapper) in self.parts.items():
            for below, style in wrapper.styles(part, name, state).items():
                found[f"{name}.{below}" if name else below] = style
        return found

    def finish(self, root: nn.Module, state: ParallelState) -> None:
        """Let each do what is left, innermost first."""
        for part, wrapper in reversed(self.parts.values()):
            wrapper.finish(part, root, state)


def look(root: nn.Module) -> Wrapped:
    """Find the modules that wrap others below `root`."""
    found = Wrapped()
    known = {"": ""}  # name now → name in the plan, of everything that is no wrapper's own
    attributes: dict[str, str] = {}
    for name, part in root.named_modules():
        owner, _, leaf = name.rpartition(".")
        if name and owner not in known:
            found.own.add(name)
            continue
        if name:
            if owner not in attributes:
                known[name] = f"{known[owner]}.{leaf}".removeprefix(".")
            elif attributes[owner] == leaf:
                known[name] = known[owner]
            else:
                found.own.add(name)
                continue
        found.places[known[name]] = name
        for wrapper in KNOWN:
            attribute = wrapper.inner(part)
            if attribute is not None:
                found.parts[name] = part, wrapper
                attributes[name] = attribute
                break
    return found


def kept_names(wrapped: Wrapped, names: Iterable[str]) -> Iterator[str]:
    """The parameters among `names` that belong to wrapping modules."""
    own = wrapped.own | set(wrapped.parts)
    return (name for name in names if name.rpartition(".")[0] in own)
