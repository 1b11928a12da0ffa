"""From the sizes asked for and the number of processes to a layout, or to an error that computes.

Sources of the rules: the axes multiply to the number of processes; experts view the ranks of one
copy (dp_shard × cp × sp × tp) as efsdp × ep, so ep_size divides that product.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from plait.errors import LayoutError
from plait.layout import checks
from plait.layout.axes import AXES, UNBUILT

if TYPE_CHECKING:
    from plait.layout.config import ParallelismConfig

_log = logging.getLogger("plait")


@dataclass(frozen=True)
class Layout:
    """How the processes of one run are arranged. Made by `config.resolve(world_size)`.

    Args:
        sizes: Ranks along each axis, every axis present, outermost first.
        ep: Ranks that share the experts.
    """

    sizes: dict[str, int]
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def tp_size(self) -> int:
        """Ranks along the tensor-parallel axis."""
        return self.sizes["tp"]

    @property
    def folded(self) -> dict[str, int]:
        """The sizes as parameters see them: ranks that share a sequence are shards of a copy."""
        shards = self.sizes["dp_shard"] * self.sizes["cp"] * self.sizes["sp"]
        return {"dp_replicate": self.sizes["dp_replicate"], "dp_shard": shards, "tp": self.tp_size}

    @property
    def is_single(self) -> bool:
        """Whether nothing is split: an ordinary model in every process."""
        return self.world_size == 1

    def __str__(self) -> str:
        return factors(self.sizes) if not self.is_single else "one process"


def factors(sizes: Mapping[str, int]) -> str:
    """The sizes above 1 as "dp_shard 2 × tp 4", or "tp 1" when there is none."""
    above = {axis: size for axis, size in sizes.items() if size > 1} or {"tp": 1}
    return " × ".join(f"{axis} {size}" for axis, size in above.items())


def resolve(config: "ParallelismConfig", world_size: int | None) -> Layout:
    """The layout of `config` on `world_size` processes.

    Args:
        config: The sizes; tp_size None with a plan takes what the other sizes leave.
        world_size: Number of processes; None when there is no launcher and no process group.

    Returns:
        The layout; a single one when all sizes are 1, or without a launcher (with a logged line).

    Raises:
        LayoutError: A feature is not built, or the sizes do not multiply to `world_size`.
    """
    if world_size is None:
        asked_sizes = _sizes(config, 1)
        if config.ep_size > 1 or math.prod(asked_sizes.values()) > 1:
            _log.warning(
                "%s asked for, but this is one process without a launcher: nothing is split. "
                "Start it with torchrun --nproc-per-node %d.",
                factors(asked_sizes),
                math.prod(asked_sizes.values()),
            )
        return _single()
    problem = checks.size("WORLD_SIZE", world_size)
    if problem:
        raise LayoutError(_asked(config, world_size), problem)
    unbuilt = _unbuilt(config)
    others = math.prod(_sizes(config, 1).values()) // (config.tp_size or 1)
    derived_tp = world_size // others if _derives_tp(config) else 1
    sizes = _sizes(config, derived_tp)
    if not unbuilt and math.prod(sizes.values()) == 1 and not _derives_tp(config):
        return _single()
    problems = _arithmetic(config, sizes, others, world_size)
    if unbuilt:
        raise LayoutError(_asked(config, world_size), unbuilt + problems, _without_unbuilt(config))
    if problems:
        raise LayoutError(
            _asked(config, world_size), problems, _ways_out(config, sizes, others, world_size)
        )
    return Layout(sizes, config.ep_size)


def _single() -> Layout:
    return Layout(dict.fromkeys(AXES, 1))


def _sizes(config: "ParallelismConfig", derived_tp: int) -> dict[str, int]:
    sizes = {axis: getattr(config, f"{axis}_size") for axis in AXES}
    if sizes["tp"] is None:
        sizes["tp"] = derived_tp
    return sizes


def _derives_tp(config: "ParallelismConfig") -> bool:
    return config.tp_size is None and getattr(config, "tp_plan", None) is not None


def _asked(config: "ParallelismConfig", world_size: object) -> str:
    names = [f"{axis}_size" for axis in AXES if (getattr(config, f"{axis}_size") or 1) > 1]
    names += ["ep_size"] if config.ep_size > 1 else []
    sizes = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    if _derives_tp(config):
        sizes = ", ".join(filter(None, (sizes, "tp_size from WORLD_SIZE")))
    return f"{type(config).__name__}({sizes}) on WORLD_SIZE {world_size}"


def _unbuilt(config: "ParallelismConfig") -> list[str]:
    """Each field set to something whose feature does not exist."""
    return [
        f"{name}={getattr(config, name)!r}: {UNBUILT[name]} is not built in this version of plait"
        for name in _set_unbuilt(config)
    ]


def _set_unbuilt(config: "ParallelismConfig") -> list[str]:
    """Names of the unbuilt fields that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(config)}
    return [
        name
        for name in UNBUILT
        if name in defaults and getattr(config, name) not in (None, defaults[name])
    ]


def _without_unbuilt(config: "ParallelismConfig") -> list[str]:
    names = _set_unbuilt(config)
    built = [f"{axis}_size" for axis in AXES if f"{axis}_size" not in UNBUILT]
    return [f"leave out {', '.join(names)}", f"split by {', '.join(built)} instead"]


def _arithmetic(
    config: "ParallelismConfig", sizes: Mapping[str, int], others: int, world_size: int
) -> list[str]:
    problems = []
    product = math.prod(sizes.values())
    if _derives_tp(config) and world_size % others:
        rest = {axis: size for axis, size in sizes.items() if axis != "tp"}
        problems.append(
            f"tp_size is what {factors(rest)} leave of WORLD_SIZE, but WORLD_SIZE {world_size} is "
            f"not divisible by {others}."
        )
    elif product != world_size:
        several = sum(size > 1 for size in sizes.values()) > 1
        computed = f"{factors(sizes)} = {product}" if several else f"{factors(sizes)} alone"
        problems.append(f"{computed}, but WORLD_SIZE is {world_size}.")
    copy = product // sizes["dp_replicate"]
    if copy % config.ep_size:
        rest = {axis: size for axis, size in sizes.items() if axis != "dp_replicate"}
        problems.append(
            f"ep_size {config.ep_size} does not divide the ranks of one copy, {factors(rest)} "
            f"= {copy}."
        )
    return problems


def _ways_out(
    config: "ParallelismConfig", sizes: Mapping[str, int], others: int, world_size: int
) -> list[str]:
    """Sizes and process counts that would fit, features that are not built left out."""
    ways = []
    product = math.prod(sizes.values())
    if product != world_size:
        if not _derives_tp(config) or world_size < others:
            ways.append(f"start {max(product, others)} processes (torchrun --nproc-per-node)")
        for axis in ("tp", "dp_shard", "dp_replicate"):
            name, rest = f"{axis}_size", product // sizes[axis]
            if name not in UNBUILT and world_size % rest == 0:
                ways.append(f"set {name}={world_size // rest}")
    if product and (product // sizes["dp_replicate"]) % config.ep_size:
        copy = product // sizes["dp_replicate"]
        ways.append(f"set ep_size to a divisor of {copy}")
    return ways[:3]
