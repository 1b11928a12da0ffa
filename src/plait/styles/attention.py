"""An attention whose counts are those of one rank: what its own code reads of heads and widths.

The projections hand it this rank's heads. Where its forward reads `self.num_heads`, or a width that
is a number of heads, it has to find the rank's; tensors with a row for every head of the model (a
bias by head, slopes) are cut to the rank's rows as they come in.
"""

import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import copy_to
from plait.plan import roles
from plait.plan.heads import Attention, HeadMap
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
_BY_HEAD = ("alibi", "position_bias", "attention_mask", "attention_bias", "relative_position_bias")
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
    values: dict[str, tuple[int, int]] = {}
    for name in _QUERY_COUNTS:
        values[name] = (heads.num_heads, len(places))
    for name in roles.NUM_KV_HEADS:
        values[name] = (heads.num_kv_heads, len(kv))
    for name in _GROUPS:
        values[name] = (heads.group, heads.local_group(rank))
    for dim in (found.v_dim, found.qk_dim):
        for name in _WIDTHS:
            values.setdefault(name, (heads.num_heads * dim, len(places) * dim))
        for name in _KV_WIDTHS:
            values.setdefault(name, (heads.num_kv_heads * dim, len(kv) * dim))
    for name, (whole, local) in values.items():
        if type(module.__dict__.get(name)) is int and module.__dict__[name] == whole:
            module.__dict__[name] = local
    _localize_config(module, values)
    _localize_inputs(module, heads, places, mesh)


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
        import copy

        return LocalConfig(copy.deepcopy(self._plait_config, memo), self._plait_values)


def _localize_config(module: nn.Module, values: Mapping[str, tuple[int, int]]) -> None:
    config = module.__dict__.get("config")
    if config is None:
        return
    read = _attributes_read(_kind(module))
    local = {
        name: part
        for name, (whole, part) in values.items()
        if name in read and name not in module.__dict__ and getattr(config, name, None) == whole
    }
    if local:
        module.__dict__["config"] = LocalConfig(config, local)


@lru_cache(maxsize=1024)
def _attributes_read(kind: Any) -> frozenset[str]:
    """Names of all attributes that the methods of a class mention, but for its __init__."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            break
        for key, function in vars(base).items():
            code = getattr(function, "__code__", None)
            if key != "__init__" and isinstance(code, types.CodeType):
                names |= set(code.co_names)
    return frozenset(names)


def _localize_inputs(
    module: nn.Module, heads: HeadMap, places: tuple[int, ...], mesh: DeviceMesh
) -> None:
    module.__dict__[_ROWS] = _Rows(heads.num_heads, places, mesh)
    module.__dict__[_INNER] = module.__dict__.get("forward")
    rebind(module, _forward_by_head)


def _forward_by_head(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    rows: _Rows = module.__dict__[_ROWS]
    for name in _BY_HEAD:
        if kwargs.get(name) is not None:
            kwargs[name] = rows.of(kwargs[name], flat="mask" not in name)
    if len(args) > 1:  # the first one is the hidden states
        args = (args[0], *(rows.of(x) for x in args[1:]))
    inner = module.__dict__[_INNER]
    if inner is not None:
        return inner(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


class _Rows:
    """This rank's rows of a tensor that has one for every head of the model."""

    __slots__ = ("mesh", "num_heads", "places")

    def __init__(self, num_heads: int, places: tuple[int, ...], mesh: DeviceMesh) -> None:
        self.num_heads, self.places, self.mesh = num_heads, places, mesh

    def of(self, x: Any, flat: bool = False) -> Any:
        """The rank's rows of `[batch, heads, query, key]`; anything else as it is.

        Args:
            x: An argument of the attention.
            flat: Whether three dims mean `[batch · heads, query, key]`.
        """
        if not isinstance(x, torch.Tensor) or self.num_heads == 1:
            return x
        if x.ndim == 4 and x.shape[1] == self.num_heads:
            return self._select(x, 1)
        if flat and x.ndim == 3 and x.shape[0] % self.num_heads == 0:
            by_head = x.view(-1, self.num_heads, *x.shape[1:])
            return self._select(by_head, 1).reshape(-1, *x.shape[1:])
        return x

    def _select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.requires_grad:  # each rank's gradient is that of its own rows
            x = copy_to(x, self.mesh)
        return x.index_select(dim, torch.tensor(self.places, device=x.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Rows":
        return self  # nothing in it changes, and a mesh cannot be copied


def _kind(module: nn.Module) -> Any:
    return type(module)  # hashable, which its stub denies
