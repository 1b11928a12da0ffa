"""A model as a tree of modules, with the questions that `derive` asks of it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.plan.names import ModelNames

LINEAR = ("Linear", "Conv1D")
"""Classes that multiply by a 2-D weight: `[out, in]`, and `[in, out]` for transformers' Conv1D."""


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        name: Its full name.
        role: The name that says what it is for: its own last part, or that of a module that only
            wraps it (`q_proj` of `q_proj.linear`).
        width: Output features.
        into: Input features.
    """

    name: str
    role: str
    width: int
    into: int


def last(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]


def parent(name: str) -> str:
    """All but the last part of a dotted name."""
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Tree:
    """The modules of a model by parent, and their parameters by owner.

    Attributes:
        names: The model.
    """

    names: ModelNames
    _layers: dict[str, tuple[Layer, ...]] = field(default_factory=dict)

    @cached_property
    def children(self) -> Mapping[str, Sequence[str]]:
        """Module → the modules directly below it, in order."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names.modules:
            if name:
                found[parent(name)].append(name)
        return found

    @cached_property
    def own_params(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Module → local name → shape, of the parameters that it holds itself."""
        found: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name, owner in self.names.owners.items():
            found[owner][last(name)] = self.names.params[name]
        return found

    def kind(self, name: str) -> str:
        """The class of a module."""
        return self.names.modules.get(name, "")

    def layer(self, name: str) -> Layer | None:
        """The linear layer that a module is or only wraps."""
        role = last(name)
        if self.kind(name) not in LINEAR and "Linear" in self.kind(name):
            below = self.children.get(name, ())
            inner = [child for child in below if self.kind(child) in LINEAR]
            if len(below) != 1 or not inner or self.own_params.get(name):
                return None
            name = inner[0]
        shape = self.own_params.get(name, {}).get("weight", ())
        if self.kind(name) not in LINEAR or len(shape) != 2:
            return None
        if set(self.own_params[name]) - {"weight", "bias"} or self.children.get(name):
            return None  # a subclass with parts of its own
        out, into = shape if self.kind(name) == "Linear" else shape[::-1]
        return Layer(name, role, out, into)

    def layers(self, name: str) -> tuple[Layer, ...]:
        """The linear layers directly below a module, in order."""
        if name not in self._layers:
            found = (self.layer(child) for child in self.children.get(name, ()))
            self._layers[name] = tuple(layer for layer in found if layer)
        return self._layers[name]

    def below(self, name: str) -> Iterator[str]:
        """All modules below one, in order."""
        for child in self.children.get(name, ()):
            yield child
            yield from self.below(child)

    def has_params(self, name: str) -> bool:
        """Whether a module or one below it holds a parameter."""
        return bool(self.own_params.get(name)) or any(
            self.own_params.get(child) for child in self.below(name)
        )

    def facts(self, name: str) -> Mapping[str, int]:
        """Integers that hold for a module: its own before those of the nearest config above it."""
        facts = self.names.facts
        found = {key: value for key, value in facts.get("", {}).items() if "." not in key}
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            for key, value in facts.get(".".join(parts[:end]), {}).items():
                if key.startswith("config."):
                    found[key.removeprefix("config.")] = value
        own = {k: v for k, v in facts.get(name, {}).items() if "." not in k} if name else {}
        return found | own

    def fact(self, name: str, keys: Sequence[str]) -> int | None:
        """The first of `keys` that is known of a module; its own integers before its config's."""
        own = self.names.facts.get(name, {}) if name else {}
        for facts in (own, self.facts(name)):
            for key in keys:
                if facts.get(key, 0) > 0:
                    return facts[key]
        return None


@dataclass
class Found:
    """What `derive` has decided so far.

    Attributes:
        styles: Concrete module or parameter name → style.
        reasons: Concrete name → why it, or what it computes, stays whole.
        seen: Linear layers that a block has claimed.
    """

    styles: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def style(self, layer: Layer, style: str) -> None:
        """Give a linear layer a style."""
        self.styles[layer.name] = style
        self.seen.add(layer.name)

    def whole(self, layer: Layer, reason: str) -> None:
        """Leave a linear layer whole."""
        self.reasons[layer.name] = reason
        self.seen.add(layer.name)

    def gathered(self, before: Sequence[Layer], after: Layer | None) -> None:
        """Cut layers that are only called, with a whole input and a whole output each."""
        for layer in before:
            self.style(layer, "colwise_gather_output")
        if after is not None:
            self.style(after, "rowwise_split_input")
