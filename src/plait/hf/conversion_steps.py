"""The operations of transformers' converters, run on recipes instead of tensors.

An operation of a kind that is not known here is kept whole: it is tried on meta tensors for the
names and shapes that it makes, and runs on whole tensors when the recipe is read.

Written against the operations of transformers 5.23 (`core_model_loading`), told apart by the names
of their classes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import WeightsError
from plait.weights.recipes import (
    Concat,
    Evaluation,
    Narrow,
    Recipe,
    Regroup,
    Select,
    Source,
    Stack,
    Transpose,
)
from plait.weights.store import TensorStore

Values = dict[str, list[Recipe]]
"""What the operations of a converter pass on: recipes by pattern or by name."""


@dataclass
class Group:
    """The tensors that one converter takes together, or one tensor that is only renamed.

    Args:
        converter: The entry of the table, or None.
        keys: The names of the tensors, by the pattern of the converter that they match.
    """

    converter: Any | None
    keys: dict[str, list[str]] = field(default_factory=dict)

    def run(self, model: nn.Module, store: TensorStore, target: str) -> dict[str, Recipe]:
        """Returns the recipes of all tensors that the group makes, by their full names."""
        if self.converter is None:
            return {target: Source(next(iter(self.keys.values()))[0])}
        values: Values = {p: [Source(key) for key in keys] for p, keys in self.keys.items()}
        call = _Call(model, store, self.converter, target)
        for operation in self.converter.operations:
            try:
                step = _STEPS.get(type(operation).__name__, _opaque)
                values = step(operation, values, call)
            except WeightsError:
                raise
            except Exception as error:
                sources = [key for keys in self.keys.values() for key in keys]
                raise WeightsError(
                    f"Make {target} from {', '.join(sources[:4])}.",
                    f"transformers' {type(operation).__name__} does not fit: {error}",
                ) from error
        full = target.replace("*.", "0.") if "*." in target else target
        made = {name: recipes[0] for name, recipes in values.items()}
        for name in made:
            if name in full:
                before, _, after = full.partition(name)
                return {before + key + after: recipe for key, recipe in made.items()}
        return made


@dataclass(frozen=True)
class _Call:
    """What an operation may look at."""

    model: Any
    store: TensorStore
    converter: Any
    target: str

    @property
    def sources(self) -> list[str]:
        return list(self.converter.source_patterns)

    @property
    def targets(self) -> list[str]:
        return list(self.converter.target_patterns)

    def shape(self, recipe: Recipe) -> tuple[int, ...]:
        return recipe.shape(self.store)

    def keywords(self) -> dict[str, Any]:
        return {
            "source_patterns": self.sources,
            "target_patterns": self.targets,
            "full_layer_name": self.target,
            "model": self.model,
            "config": self.model.config,
            "missing_keys": None,
        }


def _one(values: Values) -> Recipe:
    """The only recipe, for operations that take one tensor."""
    return next(iter(values.values()))[0]


def _chunk(op: Any, values: Values, call: _Call) -> Values:
    if len(values) > 1:
        raise ValueError(f"it splits one tensor, but was given {len(values)}")
    x, targets = _one(values), op.get_target_patterns(call.targets, config=call.model.config)
    size = call.shape(x)[op.dim]
    step = -(-size // len(targets))
    cuts = [(min(i * step, size), min((i + 1) * step, size)) for i in range(len(targets))]
    return {t: [Narrow(op.dim, a, b, x)] for t, (a, b) in zip(targets, cuts, strict=True)}


def _split(op: Any, values: Values, call: _Call) -> Values:
    x, result, start = _one(values), Values(), 0
    for target in call.targets:
        name = call.target.replace(call.targets[0], target)
        stop = start + call.model.get_parameter(name).shape[op.dim]
        result[target] = [Narrow(op.dim, start, stop, x)]
        start = stop
    return result


def _concatenate(op: Any, values: Values, call: _Call) -> Values:
    inputs = [x for pattern in call.sources for x in values.get(pattern, [])]
    return {op.get_target_pattern(call.targets): [Concat(op.dim, tuple(inputs))]}


def _merge(op: Any, values: Values, call: _Call) -> Values:
    count = len(values)
    return {
        op.get_target_pattern(count, pattern, call.targets): [Stack(op.dim, tuple(inputs))]
        for pattern, inputs in values.items()
    }


def _unmerge(op: Any, values: Values, call: _Call) -> Values:
    result = Values()
    for pattern, inputs in values.items():
        count = call.shape(inputs[0])[op.dim]
        names = op.get_target_patterns(values, pattern, call.targets, count)
        for i, name in enumerate(names):
            result[name] = [Select(op.dim, i, inputs[0])]
    return result


def _transpose(op: Any, values: Values, call: _Call) -> Values:
    name = op.get_target_pattern(values, call.sources, call.targets)
    x = _one(values)
    if op.check_dims and call.shape(x) == tuple(call.model.get_parameter(call.target).shape):
        return {name: [x]}
    return {name: [Transpose(op.dim0, op.dim1, x)]}


def _interleave(op: Any, values: Values, call: _Call) -> Values:
    x = _one(values)
    half = call.shape(x)[op.dim] // 2
    rows, columns = (2, half) if op.inverse else (half, 2)
    return {call.targets[0]: [Regroup(op.dim, 1, rows, columns, x)]}


def _permute_for_rope(op: Any, values: Values, call: _Call) -> Values:
    config = call.model.config
    if op.subconfig_key is not None:
        config = getattr(config, op.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    result = Values()
    for pattern, inputs in values.items():
        name = op.get_target_pattern(pattern, call.sources, call.targets)
        only = op.permute_layer_names
        shape = call.shape(inputs[0])
        if len(shape) > 2 or not (only is None or any(part in pattern for part in only)):
            result[name] = inputs
            continue
        half = shape[0] // heads // 2
        rows, columns = (2, half) if op.inverse else (half, 2)
        result[name] = [Regroup(0, heads, rows, columns, inputs[0])]
    return result


def _identity(op: Any, values: Values, call: _Call) -> Values:
    return values


def _opaque(op: Any, values: Values, call: _Call) -> Values:
    """An operation of another kind: tried on meta for names and shapes, run when it is read."""
    counts = {name: len(inputs) for name, inputs in values.items()}
    keywords = call.keywords()

    def run(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        left = list(tensors)
        given: dict[str, list[Tensor]] = {}
        for name, count in counts.items():
            given[name], left = left[:count], left[count:]
        made = op.convert(given, **_fresh(keywords))
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    inputs = [x for group in values.values() for x in group]
    shapes = [(call.shape(x), x.dtype(call.store)) for x in inputs]
    names = run(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes)
    evaluation = Evaluation(
        lambda tensors: list(run(tensors).values()),
        inputs,
        [tuple(x.shape) for x in names.values()],
    )
    return {name: [x] for name, x in zip(names, evaluation.outputs(), strict=True)}


def _fresh(keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, with pattern lists that it may change."""
    return {key: list(x) if isinstance(x, list) else x for key, x in keywords.items()}


_STEPS: dict[str, Callable[[Any, Values, _Call], Values]] = {
    "Chunk": _chunk,
    "Split": _split,
    "Concatenate": _concatenate,
    "MergeModulelist": _merge,
    "SplitModulelist": _unmerge,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "_IdentityOp": _identity,
}
