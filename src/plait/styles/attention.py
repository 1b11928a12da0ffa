"""An attention whose counts are those of one rank: what its own code reads of heads and widths.

The projections hand it this rank's heads. Where its forward reads `self.num_heads`, or a width that
is a number of heads, it has to find the rank's; tensors with a row for every head of the model (a
bias by head, slopes) are cut to the rank's rows as they come in.
"""

import copy
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import copy_to
from plait.plan import roles
from plait.plan.heads import Attention, HeadMap
from plait.styles.code import kind_of, mentioned
from plait.styles.layer import rebind

_QUERY_COUNTS = (*roles.NUM_HEADS, "num_attn_heads", "no_heads", "attention_heads")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")
_WIDTHS = (
    "embed_dim",
    "hidden_size",
    "all_head_size",
    "inner_dim",
    "split_size",
    "d_model",
    "hidden_dim",
    "q_dim",
    "qkv_dim",
    "output_dim",
)
_KV_WIDTHS = ("kv_dim", "kv_size")
_BY_HEAD = frozenset(
    ("alibi", "position_bias", "attention_bias", "attn_bias", "relative_position_bias", "rel_pos")
    + ("rel_2d_pos", "attention_mask", "attn_mask", "mask")
)
"""Arguments that may have a row for every head."""
_NO_COUNT = ("dim", "size", "width", "layer", "idx", "index", "per_head", "group", "expert", "len")
_INNER = "_plait_whole_heads_forward"
_ROWS = "_plait_rows"


def localize(module: nn.Module, found: Attention, mesh: DeviceMesh) -> None:
    """Give an attention the counts and widths of this rank's heads, in place.

    Only attributes that have the whole model's value are changed; the names are those that models
    use. An attention that reads a count from its config gets a view of the config in which the
    count is the rank's.

    Args:
        module: The attention.
        found: Its heads on every rank.
        mesh: The axis.
    """
    rank, heads = mesh.get_local_rank(), found.heads
    places, kv = heads.places(rank), heads.kv[rank]
    values: dict[str, list[tuple[int, int]]] = {}
    for name in _QUERY_COUNTS:
        values[name] = [(heads.num_heads, len(places))]
    for name in roles.NUM_KV_HEADS:
        values[name] = [(heads.num_kv_heads, len(kv))]
    for name in _GROUPS:
        values[name] = [(heads.group, heads.local_group(rank))]
    for dim in (found.v_dim, found.qk_dim):  # a name says not which of the two it is
        for name in _WIDTHS:
            values.setdefault(name, []).append((heads.num_heads * dim, len(places) * dim))
        for name in _KV_WIDTHS:
            values.setdefault(name, []).append((heads.num_kv_heads * dim, len(kv) * dim))
    for name in _other_counts(module, heads, frozenset(values)):
        of_kv = _is_of_kv(name)
        whole, local = (heads.num_kv_heads, len(kv)) if of_kv else (heads.num_heads, len(places))
        values[name] = [(whole, local)]
    for name, pairs in values.items():
        value = module.__dict__.get(name)
        if type(value) is int:
            module.__dict__[name] = dict(reversed(pairs)).get(value, value)
    _localize_config(module, values)
    _localize_inputs(module, heads, places, mesh)


def _is_of_kv(name: str) -> bool:
    return any(part in name.lower() for part in ("kv", "key", "value"))


def _other_counts(module: nn.Module, heads: HeadMap, known: frozenset[str]) -> list[str]:
    """Attributes of other names that the module's own code reads and that are counts of heads.

    Those that speak of heads; and, where the code reads no count that has a known name, those that
    are called like a count.
    """
    read = mentioned(kind_of(module))
    names = [n for n, x in module.__dict__.items() if type(x) is int and n in read - known]
    counts = {*_QUERY_COUNTS, *roles.NUM_KV_HEADS}
    found = []
    for name in names:
        low = name.lower()
        if name in roles.HEAD_DIM or any(part in low for part in _NO_COUNT):
            continue
        is_count = len(low) <= 3 or low.startswith(("n_", "num_", "no_"))
        if "head" not in low and not (is_count and not read & counts):
            continue
        whole = heads.num_kv_heads if _is_of_kv(name) else heads.num_heads
        if module.__dict__[name] == whole:
            found.append(name)
    return found


class LocalConfig:
    """A config as an attention sees it: some counts are those of one rank.

    Args:
        config: The model's config; what is set later is seen here.
        values: Attribute → value on this rank.
    """

    def __init__(self, config: Any, values: Mapping[str, int]) -> None:
        object.__setattr__(self, "_plait_config", config)
        object.__setattr__(self, "_plait_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name in ("_plait_config", "_plait_values"):
            raise AttributeError(name)
        values = self._plait_values
        return values[name] if name in values else getattr(self._plait_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._plait_config, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._plait_config)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalConfig, (self._plait_config, self._plait_values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalConfig":
        return LocalConfig(copy.deepcopy(self._plait_config, memo), self._plait_values)


def _localize_config(module: nn.Module, values: Mapping[str, list[tuple[int, int]]]) -> None:
    config = module.__dict__.get("config")
    if config is None:
        return
    read = mentioned(kind_of(module))
    local = {
        name: part
        for name, pairs in values.items()
        for whole, part in reversed(pairs)  # of equal ones that of the values
        if name in read and name not in module.__dict__ and getattr(config, name, None) == whole
    }
    if local:
        module.__dict__["config"] = LocalConfig(config, local)


def _localize_inputs(
    module: nn.Module, heads: HeadMap, places: tuple[int, ...], mesh: DeviceMesh
) -> None:
    module.__dict__[_ROWS] = _Rows(heads.num_heads, places, mesh)
    module.__dict__[_INNER] = module.__dict__.get("forward")
    rebind(module, _forward_by_head)


def _forward_by_head(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    rows: _Rows = module.__dict__[_ROWS]
    names = positional(type(module).forward)
    first = args[0] if args else kwargs.get(names[0]) if names else None
    batch = first.shape[0] if isinstance(first, torch.Tensor) and first.ndim > 2 else 1
    for name in [n for n in kwargs if n in _BY_HEAD]:  # the same order on every rank
        kwargs[name] = rows.of(kwargs[name], batch, flat="mask" not in name)
    if len(args) > 1:
        called = dict(enumerate(names[: len(args)]))
        args = tuple(
            rows.of(x, batch, flat="mask" not in called[i]) if called.get(i) in _BY_HEAD else x
            for i, x in enumerate(args)
        )
    inner = module.__dict__[_INNER]
    if inner is not None:
        return inner(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


@lru_cache(maxsize=1024)
def positional(forward: Any) -> tuple[str, ...]:
    """Names of the positional arguments of a forward, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in found if p.kind in kinds)[1:]


class _Rows:
    """This rank's rows of a tensor that has one for every head of the model."""

    __slots__ = ("mesh", "num_heads", "places")

    def __init__(self, num_heads: int, places: tuple[int, ...], mesh: DeviceMesh) -> None:
        self.num_heads, self.places, self.mesh = num_heads, places, mesh

    def of(self, x: Any, batch: int, flat: bool = False) -> Any:
        """The rank's rows of `[batch, heads, query, key]`; anything else as it is.

        Args:
            x: An argument of the attention.
            batch: The number of sequences.
            flat: Whether three dims mean `[batch · heads, query, key]` or `[heads, query, key]`.
        """
        if not isinstance(x, torch.Tensor) or self.num_heads == 1:
            return x
        if x.ndim == 4 and x.shape[1] == self.num_heads:
            return self._select(x, 1)
        if flat and x.ndim == 3 and x.shape[0] in (self.num_heads, batch * self.num_heads):
            by_head = x.view(-1, self.num_heads, *x.shape[1:])
            return self._select(by_head, 1).reshape(-1, *x.shape[1:])
        return x

    def _select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.requires_grad:  # each rank's gradient is that of its own rows
            x = copy_to(x, self.mesh)
        return x.index_select(dim, torch.tensor(self.places, device=x.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Rows":
        return self  # nothing in it changes, and a mesh cannot be copied
