"""Recipes: how a parameter is made from the tensors of a checkpoint.

A recipe is an expression tree over checkpoint tensors. Asked for a region of its result, it asks
its sources for exactly the regions that go into it, and lets them write straight into the (view of
the) destination: an expert fused from a hundred tensors is read without a second copy, and a
rank's slice of a fused weight touches only that slice's bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from plait.errors import WeightsError
from plait.plan.intervals import Pieces, inside, joined, length, taken
from plait.weights.regions import Region, along, copy_region, shape_in, with_pieces
from plait.weights.store import TensorStore, Viewable

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """One node of an expression tree; the subclasses are the operations."""

    def names(self) -> tuple[str, ...]:
        """Returns the names of the tensors that it is made of, in order, each once."""
        found: dict[str, None] = {}
        for part in self.parts():
            found.update(dict.fromkeys(part.names()))
        return tuple(found)

    def parts(self) -> tuple["Recipe", ...]:
        """Returns the recipes below this one."""
        return ()

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape of the result."""
        return self.parts()[0].shape(store)

    def dtype(self, store: TensorStore) -> torch.dtype:
        """Returns the dtype of the result where none is asked for: it holds all sources."""
        return reduce(torch.promote_types, (part.dtype(store) for part in self.parts()))

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Writes a region of the result into `out`, cast to its dtype."""
        raise TypeError(f"{type(self).__name__} is no operation; use one of its subclasses")

    def view(self, store: Viewable, region: Region) -> Tensor | None:
        """Returns a region as a view of what the store holds, or None where it must be read."""
        return None

    def read(
        self,
        store: TensorStore,
        dim: int | None = None,
        pieces: Pieces = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Reads the pieces of the result along one dimension.

        Args:
            store: Where the sources are: a checkpoint, or a model.
            dim: The dimension that is cut, or None for the whole result.
            pieces: The wanted index ranges along `dim`, in the order of the result.
            dtype: The dtype of the result; by default one that holds all sources.
            device: Where the result lies.

        Returns:
            A new contiguous tensor.
        """
        shape = self.shape(store)
        region = along(len(shape), dim, pieces)
        kind = dtype or self.dtype(store)
        out = torch.empty(shape_in(shape, region), dtype=kind, device=device)
        with torch.no_grad():
            self.read_into(store, region, out)
        return out


@dataclass(frozen=True)
class Source(Recipe):
    """A tensor of the store, as it is."""

    key: str

    def names(self) -> tuple[str, ...]:
        """Returns its one name."""
        return (self.key,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape in the store."""
        return store.info(self.key)[0]

    def dtype(self, store: TensorStore) -> torch.dtype:
        """Returns the dtype in the store."""
        return store.info(self.key)[1]

    def view(self, store: Viewable, region: Region) -> Tensor | None:
        """Lets the store view the region."""
        return store.view(self.key, region)

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Lets the store write the region."""
        store.read_into(self.key, region, out)


@dataclass(frozen=True)
class Concat(Recipe):
    """The parts one after another along `dim`."""

    dim: int
    inputs: tuple[Recipe, ...]

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the parts in order."""
        return self.inputs

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape of the parts, their sizes along `dim` added up."""
        shapes = [part.shape(store) for part in self.inputs]
        first, dim = shapes[0], self.dim % len(shapes[0])
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(others) > 1:
            raise WeightsError(
                f"Concatenate {', '.join(self.names()[:4])} along dim {self.dim}.",
                f"their shapes are {', '.join(str(shape) for shape in shapes[:4])}",
            )
        return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Lets every part write its share of the region."""
        dim = self.dim % len(region)
        sizes = [part.shape(store)[dim] for part in self.inputs]
        position = 0
        wanted = region[dim]
        for a, b in ((0, sum(sizes)),) if wanted is None else wanted:
            start = 0
            for part, size in zip(self.inputs, sizes, strict=True):
                cut = inside(((a, b),), start, start + size)
                start += size
                if not cut:
                    continue
                target = out.narrow(dim, position, length(cut))
                position += length(cut)
                pieces = None if cut == ((0, size),) else cut
                part.read_into(store, with_pieces(region, dim, pieces), target)


@dataclass(frozen=True)
class Stack(Recipe):
    """The parts side by side along a new dimension `dim`."""

    dim: int
    inputs: tuple[Recipe, ...]

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the parts in order."""
        return self.inputs

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape of one part with the number of parts put in at `dim`."""
        shapes = {part.shape(store) for part in self.inputs}
        if len(shapes) > 1:
            raise WeightsError(
                f"Stack {', '.join(self.names()[:4])}.",
                f"their shapes are {', '.join(str(shape) for shape in sorted(shapes))}",
            )
        shape = shapes.pop()
        dim = self.dim % (len(shape) + 1)
        return (*shape[:dim], len(self.inputs), *shape[dim:])

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Lets every wanted part write its slice."""
        dim = self.dim % len(region)
        below = (*region[:dim], *region[dim + 1 :])
        wanted = region[dim]
        spans = ((0, len(self.inputs)),) if wanted is None else wanted
        for position, i in enumerate(i for a, b in spans for i in range(a, b)):
            self.inputs[i].read_into(store, below, out.select(dim, position))


@dataclass(frozen=True)
class Narrow(Recipe):
    """The indices `[start, stop)` of `input` along `dim`."""

    dim: int
    start: int
    stop: int
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that is cut."""
        return (self.input,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape with `stop - start` at `dim`."""
        shape = self.input.shape(store)
        dim = self.dim % len(shape)
        if not 0 <= self.start <= self.stop <= shape[dim]:
            raise WeightsError(
                f"Take [{self.start}, {self.stop}) of dim {dim} of {self.names()[0]}.",
                f"its shape is {shape}",
            )
        return (*shape[:dim], self.stop - self.start, *shape[dim + 1 :])

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Asks for the region moved by `start`."""
        self.input.read_into(store, self._moved(region), out)

    def view(self, store: Viewable, region: Region) -> Tensor | None:
        """Views the region moved by `start`."""
        return self.input.view(store, self._moved(region))

    def _moved(self, region: Region) -> Region:
        dim = self.dim % len(region)
        pieces: Pieces = ((self.start, self.stop),)
        inner = region[dim]
        if inner is not None:
            pieces = taken(pieces, inner)
        return with_pieces(region, dim, pieces)


@dataclass(frozen=True)
class Select(Recipe):
    """The slice `index` of `input` along `dim`, which goes away: the inverse of a stack."""

    dim: int
    index: int
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that is cut."""
        return (self.input,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape without `dim`."""
        shape = self.input.shape(store)
        dim = self.dim % len(shape)
        return (*shape[:dim], *shape[dim + 1 :])

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Asks for the one slice."""
        dim = self.dim % (len(region) + 1)
        below = (*region[:dim], ((self.index, self.index + 1),), *region[dim:])
        self.input.read_into(store, below, out.unsqueeze(dim))


@dataclass(frozen=True)
class Transpose(Recipe):
    """`input` with two dimensions exchanged."""

    dim0: int
    dim1: int
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that is transposed."""
        return (self.input,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape with the two sizes exchanged."""
        return self._swapped(self.input.shape(store))

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Asks for the transposed region, written into the transposed destination."""
        self.input.read_into(store, self._swapped(region), out.transpose(self.dim0, self.dim1))

    def _swapped(self, items: tuple[T, ...]) -> tuple[T, ...]:
        result = list(items)
        result[self.dim0], result[self.dim1] = result[self.dim1], result[self.dim0]
        return tuple(result)


@dataclass(frozen=True)
class Regroup(Recipe):
    """`input` with `dim` seen as `(groups, rows, columns)` and rows and columns exchanged.

    One group: interleaving of two halves, or its undoing. One group a head: the exchange between
    the two orders of rotary embeddings (pairs side by side, or halves). The inverse is
    `Regroup(dim, groups, columns, rows, …)`.
    """

    dim: int
    groups: int
    rows: int
    columns: int
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that is regrouped."""
        return (self.input,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the same shape."""
        shape = self.input.shape(store)
        if shape[self.dim] != self.groups * self.rows * self.columns:
            raise WeightsError(
                f"Regroup dim {self.dim} of {self.names()[0]} as "
                f"{self.groups} × {self.rows} × {self.columns}.",
                f"its shape is {shape}",
            )
        return shape

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Asks for the indices that land in the region, in their new order."""
        dim = self.dim % len(region)
        size = self.groups * self.rows * self.columns
        order = torch.arange(size).view(self.groups, self.rows, self.columns)
        order = order.transpose(1, 2).reshape(-1)
        wanted = region[dim]
        if wanted is not None:
            order = torch.cat([order[a:b] for a, b in wanted] or [order[:0]])
        pieces = joined((i, i + 1) for i in order.tolist())
        self.input.read_into(store, with_pieces(region, dim, pieces), out)


@dataclass(frozen=True)
class Unsqueeze(Recipe):
    """`input` with a new dimension of size one at `dim`."""

    dim: int
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that gets the dimension."""
        return (self.input,)

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape with a one at `dim`."""
        shape = self.input.shape(store)
        return (*shape[: self.dim], 1, *shape[self.dim :])

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Asks for the region below the new dimension, as often as its one index is wanted."""
        below = (*region[: self.dim], *region[self.dim + 1 :])
        for i in range(out.shape[self.dim]):
            self.input.read_into(store, below, out.select(self.dim, i))


@dataclass(frozen=True)
class Map(Recipe):
    """A function of every element, computed in the dtype of the source and cast after it."""

    function: Callable[[Tensor], Tensor]
    input: Recipe

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the recipe that the function is applied to."""
        return (self.input,)

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Reads the same region of the input and applies the function."""
        x = torch.empty(out.shape, dtype=self.input.dtype(store), device=out.device)
        self.input.read_into(store, region, x)
        out.copy_(self.function(x))


Function = Callable[[list[Tensor]], Sequence[Tensor]]


class Evaluation:
    """A function over whole tensors, run once for all of its results that are read.

    Args:
        function: Takes the whole inputs and returns whole results.
        inputs: Its inputs.
        shapes: The shape of each result.
        dtype: The dtype in which the inputs are read; None for that of the destination.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Recipe],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Keeps the function for later."""
        self.function = function
        self.inputs = tuple(inputs)
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.dtype = dtype
        self._results: dict[int, Tensor] = {}

    def outputs(self) -> tuple["Opaque", ...]:
        """Returns a recipe for each result."""
        return tuple(Opaque(self, i) for i in range(len(self.shapes)))

    def take(self, store: TensorStore, index: int, like: Tensor) -> Tensor:
        """Returns one whole result; the others wait until they are taken, once each."""
        if index not in self._results:
            dtype = self.dtype or like.dtype
            inputs = [x.read(store, dtype=dtype, device=like.device) for x in self.inputs]
            self._results = dict(enumerate(self.function(inputs)))
        result = self._results.pop(index)
        if tuple(result.shape) != self.shapes[index]:
            raise WeightsError(
                f"Convert {', '.join(key for x in self.inputs for key in x.names()[:4])}.",
                f"the result has shape {tuple(result.shape)}, expected {self.shapes[index]}",
            )
        return result


@dataclass(frozen=True)
class Opaque(Recipe):
    """A result of a function that nothing is known about: all is read, then cut."""

    evaluation: Evaluation
    index: int = 0

    def parts(self) -> tuple[Recipe, ...]:
        """Returns the inputs of the function."""
        return self.evaluation.inputs

    def shape(self, store: TensorStore) -> tuple[int, ...]:
        """Returns the shape that was given for this result."""
        return self.evaluation.shapes[self.index]

    def read_into(self, store: TensorStore, region: Region, out: Tensor) -> None:
        """Evaluates the function and cuts its result."""
        copy_region(self.evaluation.take(store, self.index, out), region, out)
