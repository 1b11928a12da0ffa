"""Recipes: a slice that is pushed down equals the slice of the whole result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import WeightsError
from plait.weights import (
    Concat,
    Evaluation,
    Map,
    Narrow,
    Regroup,
    Select,
    Source,
    Stack,
    Transpose,
    Unsqueeze,
)
from plait.weights.regions import copy_region


class Memory:
    """A store of tensors in memory that counts the elements read."""

    def __init__(self):
        self.tensors = {}
        self.elements = 0

    def add(self, shape):
        key = f"t{len(self.tensors)}"
        count = sum(x.numel() for x in self.tensors.values())
        x = torch.arange(count, count + torch.Size(shape).numel(), dtype=torch.float64)
        self.tensors[key] = x.view(shape)
        return Source(key)

    def keys(self):
        return list(self.tensors)

    def info(self, key):
        return tuple(self.tensors[key].shape), self.tensors[key].dtype

    def read_into(self, key, region, out):
        self.elements += out.numel()
        copy_region(self.tensors[key], region, out)


def whole(recipe, memory):
    """The result of a recipe, by torch's own functions."""
    parts = [whole(part, memory) for part in recipe.parts()]
    match recipe:
        case Source(key):
            return memory.tensors[key]
        case Concat(dim):
            return torch.cat(parts, dim)
        case Stack(dim):
            return torch.stack(parts, dim)
        case Narrow(dim, start, stop):
            return parts[0].narrow(dim, start, stop - start)
        case Select(dim, index):
            return parts[0].select(dim, index)
        case Transpose(a, b):
            return parts[0].transpose(a, b)
        case Unsqueeze(dim):
            return parts[0].unsqueeze(dim)
        case Map(function):
            return function(parts[0])
        case Regroup(dim, groups, rows, columns):
            split = parts[0].unflatten(dim, (groups, rows, columns))
            return split.transpose(dim + 1, dim + 2).flatten(dim, dim + 2)
        case _:  # Opaque
            return recipe.evaluation.function(parts)[recipe.index]


@st.composite
def trees(draw, memory, shape, depth):
    """A recipe whose result has `shape`."""
    shape = tuple(shape)
    if depth == 0:
        return memory.add(shape)
    dims = st.integers(0, len(shape) - 1)
    dim = draw(dims)
    kinds = ["concat", "narrow", "transpose", "regroup", "select", "source", "map", "opaque"]
    kinds += ["stack"] * (len(shape) > 1) + ["unsqueeze"] * (len(shape) > 1 and shape[dim] == 1)

    def below(*new):
        return draw(trees(memory, new, depth - 1))

    match draw(st.sampled_from(kinds)):
        case "concat" if shape[dim] > 0:
            cut = draw(st.integers(0, shape[dim]))
            sizes = [cut, shape[dim] - cut]
            parts = [below(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
            return Concat(dim - len(shape) * draw(st.booleans()), tuple(parts))
        case "stack":
            rest = (*shape[:dim], *shape[dim + 1 :])
            return (
                Stack(dim, tuple(below(*rest) for _ in range(shape[dim])))
                if shape[dim]
                else memory.add(shape)
            )
        case "narrow":
            before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            size = before + shape[dim] + after
            x = below(*shape[:dim], size, *shape[dim + 1 :])
            return Narrow(dim, before, before + shape[dim], x)
        case "select":
            size = draw(st.integers(1, 3))
            x = below(*shape[:dim], size, *shape[dim:])
            return Select(dim, draw(st.integers(0, size - 1)), x)
        case "transpose":
            other = draw(dims)
            turned = list(shape)
            turned[dim], turned[other] = shape[other], shape[dim]
            return Transpose(dim, other, below(*turned))
        case "regroup":
            divisors = [d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0] or [1]
            groups = draw(st.sampled_from(divisors))
            each = shape[dim] // groups
            rows = draw(st.sampled_from([d for d in range(1, each + 1) if each % d == 0] or [1]))
            return Regroup(dim, groups, rows, each // rows, below(*shape))
        case "unsqueeze":
            return Unsqueeze(dim, below(*shape[:dim], *shape[dim + 1 :]))
        case "map":
            return Map(lambda x: x - 1, below(*shape))
        case "opaque":
            x = below(*shape)
            outputs = Evaluation(lambda xs: [xs[0].flip(0), xs[0] * 2], [x], [shape, shape])
            return outputs.outputs()[draw(st.integers(0, 1))]
        case _:
            return memory.add(shape)


@st.composite
def cases(draw):
    memory = Memory()
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    recipe = draw(trees(memory, shape, draw(st.integers(0, 4))))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    cuts = draw(st.lists(st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim]))))
    return memory, recipe, dim, tuple((min(cut), max(cut)) for cut in cuts)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_read_equals_the_slice_of_the_whole(case):
    memory, recipe, dim, pieces = case
    x = whole(recipe, memory)
    assert recipe.shape(memory) == tuple(x.shape)
    assert torch.equal(recipe.read(memory), x)
    rows = [i for a, b in pieces for i in range(a, b)]
    expected = x.index_select(dim, torch.tensor(rows, dtype=torch.long))
    assert torch.equal(recipe.read(memory, dim, pieces), expected)
    assert torch.equal(
        recipe.read(memory, dim, pieces, dtype=torch.float32), expected.to(torch.float32)
    )


def test_only_the_wanted_elements_are_read():
    memory = Memory()
    experts = [Concat(0, (memory.add((4, 6)), memory.add((4, 6)))) for _ in range(3)]
    recipe = Transpose(1, 2, Stack(0, tuple(experts)))
    piece = recipe.read(memory, 1, ((2, 4),))
    assert piece.shape == (3, 2, 8)
    assert memory.elements == piece.numel()
    memory.elements = 0
    heads = Regroup(0, 2, 2, 2, memory.add((8, 5)))
    assert heads.read(memory, 0, ((0, 4),)).shape == (4, 5)
    assert memory.elements == 20


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (lambda x: Transpose(0, 1, x), lambda y: Transpose(1, 0, y)),
        (lambda x: Regroup(0, 2, 3, 2, x), lambda y: Regroup(0, 2, 2, 3, y)),
        (lambda x: Unsqueeze(1, x), lambda y: Select(1, 0, y)),
        (
            lambda x: Concat(1, (Narrow(1, 3, 5, x), Narrow(1, 0, 3, x))),
            lambda y: Concat(1, (Narrow(1, 2, 5, y), Narrow(1, 0, 2, y))),
        ),
        (
            lambda x: Stack(0, tuple(Select(0, i, x) for i in range(12))),
            lambda y: y,
        ),
    ],
)
def test_operations_have_inverses(there, back):
    memory = Memory()
    x = memory.add((12, 5))
    assert torch.equal(back(there(x)).read(memory), memory.tensors["t0"])
    assert torch.equal(back(there(x)).read(memory, 0, ((3, 7),)), memory.tensors["t0"][3:7])


def test_an_evaluation_runs_once_for_all_of_its_results():
    memory, runs = Memory(), []

    def split(xs):
        runs.append(1)
        return xs[0].chunk(2)

    a, b = Evaluation(split, [memory.add((4, 2))], [(2, 2), (2, 2)]).outputs()
    first, second = a.read(memory), b.read(memory, 0, ((1, 2),))
    assert runs == [1]
    assert torch.equal(torch.cat([first, second]), memory.tensors["t0"][[0, 1, 3]])


def test_shapes_that_do_not_fit_are_named():
    memory = Memory()
    a, b = memory.add((2, 3)), memory.add((2, 4))
    with pytest.raises(WeightsError, match=r"\(2, 3\), \(2, 4\)"):
        Stack(0, (a, b)).shape(memory)
    with pytest.raises(WeightsError, match=r"\(2, 3\), \(2, 4\)"):
        Concat(0, (a, b)).shape(memory)
    with pytest.raises(WeightsError, match=r"\[1, 3\) of dim 0"):
        Narrow(0, 1, 3, a).shape(memory)
    with pytest.raises(WeightsError, match="1 × 2 × 2"):
        Regroup(0, 1, 2, 2, a).shape(memory)
    with pytest.raises(WeightsError, match="expected"):
        Evaluation(lambda xs: [xs[0].T], [a], [(2, 3)]).outputs()[0].read(memory)
