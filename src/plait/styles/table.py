"""A vocabulary-split embedding whose weight is read by other code than its own forward.

Models index rows (`embed_tokens.weight[pad_token_id]`), multiply with the table (soft embeddings)
or compare with it. What they read here is a view: rows are looked up on the rank that holds them
and summed, everything else gathers the table first.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from plait.comm import gather_from, local, sum_from
from plait.errors import PlanError
from plait.plan.intervals import even


class TableView:
    """The weight of a split embedding, for code that treats it as a whole tensor.

    Args:
        param: The weight, `[vocabulary, hidden]`, split over the vocabulary.
        mesh: The axis.

    Comm:
        For rows by integer indices: forward one all-reduce of the rows, backward nothing. For
        anything else: forward one all-gather of the table, backward nothing.
    """

    def __init__(self, param: DTensor, mesh: DeviceMesh) -> None:
        self.param = param
        self.mesh = mesh

    def __getattr__(self, name: str) -> Any:
        if name in ("param", "mesh"):
            raise AttributeError(name)
        if name == "data":
            detached: Any = self.param.detach()
            return TableView(detached, self.mesh)
        if name.endswith("_") and not name.startswith("_"):
            self._refuse(name)
        if name in _OF_THE_PARAMETER:
            return getattr(self.param, name)
        return getattr(self.whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("param", "mesh"):
            self._refuse(name)
        object.__setattr__(self, name, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse("[…] = …")

    def _refuse(self, name: str) -> NoReturn:
        raise PlanError(
            f"'{name}' of an embedding's weight, inside a forward:",
            "the table is split over the vocabulary; what is written here would reach no rank's "
            "part",
            ["write to it outside the forward", "the style 'replicate' for the embedding"],
        )

    def __len__(self) -> int:
        return int(self.param.shape[0])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.whole())

    def __neg__(self) -> torch.Tensor:
        return -self.whole()

    def whole(self) -> torch.Tensor:
        """The table, whole on every rank."""
        sizes = even(tuple(self.param.shape), 0, self.mesh.size()).sizes
        return gather_from(local(self.param), self.mesh, dim=0, sizes=sizes)

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(rows, bool) or not _is_index(rows):
            return self.whole()[index]
        found = self._rows(torch.as_tensor(rows, device=self.param.device))
        return found[(..., *rest)] if len(rest) == 1 else found if not rest else self.whole()[index]

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        size = self.param.shape[0]
        pieces = even((size,), 0, self.mesh.size()).pieces[self.mesh.get_local_rank()]
        start, stop = pieces[0] if pieces else (0, 0)
        ids = torch.where(ids < 0, ids + size, ids)
        if bool(((ids < 0) | (ids >= size)).any()):
            raise IndexError(f"index out of range for a table of {size} rows")
        elsewhere = (ids < start) | (ids >= stop)
        table = local(self.param)
        if stop > start:
            rows = table[(ids - start).masked_fill(elsewhere, 0)]
        else:  # more ranks than rows
            rows = table.new_zeros(*ids.shape, table.shape[-1]) + table.sum()
        return sum_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.mesh)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a torch function on the whole table."""
        known: dict[int, torch.Tensor] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, TableView):
                return x
            if id(x) not in known:
                known[id(x)] = x.whole()
            return known[id(x)]

        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


_OF_THE_PARAMETER = frozenset(
    {"device", "dtype", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape", "size"}
)


def _is_index(rows: Any) -> bool:
    if isinstance(rows, torch.Tensor):
        return not rows.is_floating_point() and rows.dtype is not torch.bool
    return isinstance(rows, int)


def _on_whole(name: str) -> Any:
    def operator(self: TableView, other: Any) -> Any:
        return getattr(self.whole(), name)(other)

    return operator


_ARITHMETIC = ("mul", "rmul", "matmul", "rmatmul", "add", "radd", "sub", "rsub", "truediv")
_OTHERS = ("rtruediv", "pow", "eq", "ne", "lt", "le", "gt", "ge")
for _name in _ARITHMETIC + _OTHERS:
    setattr(TableView, f"__{_name}__", _on_whole(f"__{_name}__"))
setattr(TableView, "__hash__", object.__hash__)  # noqa: B010


class ReadTables:
    """Context in which split tables below a module are views for whoever reads their weight.

    Args:
        tables: Embeddings that are split over the vocabulary.
        mesh: The axis.
    """

    __slots__ = ("mesh", "saved", "tables")

    def __init__(self, tables: list[nn.Module], mesh: DeviceMesh) -> None:
        self.tables, self.mesh = tables, mesh
        self.saved: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> None:
        for table in self.tables:
            param: Any = table._parameters["weight"]
            if isinstance(param, DTensor):
                self.saved.append((table, param))
                table._parameters["weight"] = TableView(param, self.mesh)  # type: ignore[assignment]

    def __exit__(self, *error: Any) -> None:
        for table, param in self.saved:
            table._parameters["weight"] = param
        self.saved = []


class OwnTable:
    """Context in which an embedding's own forward finds its parameter and not a view of it."""

    __slots__ = ("module", "view")

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.view: Any = self.module._parameters["weight"]
        if isinstance(self.view, TableView):
            self.module._parameters["weight"] = self.view.param

    def __exit__(self, *error: Any) -> None:
        self.module._parameters["weight"] = self.view
