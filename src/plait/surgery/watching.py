"""Has something been put into a split module since the last look? A few microseconds a look."""

from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_WATCH = "_plait_watch"


class Watch:
    """The contents of every table of modules and parameters below a root, as they were.

    Args:
        root: The module.
        params: Whether to look at parameters; FSDP exchanges them at every forward.
    """

    __slots__ = ("made", "params", "settled", "tables")

    def __init__(self, root: nn.Module | None = None, params: bool = True) -> None:
        self.settled, self.made = False, root is not None
        self.params = params
        self.tables: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        for part in root.modules() if root is not None else ():
            for table in (part._modules, part._parameters) if params else (part._modules,):
                if table:
                    self.tables.append((table, tuple(table.values())))

    def changed(self) -> bool:
        """Whether a table holds something else than it did."""
        for table, seen in self.tables:
            if len(table) != len(seen) or not all(map(is_, table.values(), seen)):
                return True
        return not self.made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        return Watch()  # a copy of the module looks for itself


def watch(root: nn.Module) -> None:
    """Remember what is in a split module now."""
    root.__dict__[_WATCH] = Watch(root, params=not is_sharded(root))


def is_sharded(root: nn.Module) -> bool:
    """Whether FSDP has cut the parameters once more."""
    return isinstance(root, FSDPModule)


def is_root(module: nn.Module) -> bool:
    """Whether `parallelize` was called on this very module, and not on one around it."""
    return _WATCH in module.__dict__


def has_changed(root: nn.Module) -> bool:
    """Whether a module or parameter below `root` was exchanged since `watch`."""
    seen: Watch = root.__dict__[_WATCH]
    return seen.changed()


def sharded_since(root: nn.Module) -> bool:
    """Whether FSDP has cut the parameters after the last `watch`, as torch's `fully_shard` does."""
    seen: Watch = root.__dict__[_WATCH]
    return seen.params and is_sharded(root)


def is_settled(root: nn.Module) -> bool:
    """Whether nothing will be exchanged for now, or `root` is not the root of what was split."""
    seen: Watch | None = root.__dict__.get(_WATCH)
    return seen is None or seen.settled


def set_settled(root: nn.Module, settled: bool) -> bool:
    """Look, or do not look, for what was exchanged; returns what held before."""
    seen: Watch | None = root.__dict__.get(_WATCH)
    if seen is None:
        return settled
    before, seen.settled = seen.settled, settled
    return before


def plain_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters below `root` that are no DTensors, by each of their names."""
    return {
        name: param
        for name, param in root.named_parameters(remove_duplicate=False)
        if not isinstance(param, DTensor)
    }
