"""Tools to test models over several ranks; public, so that users can test their own.

| name | what it is |
|---|---|
| `@pytest.mark.ranks(2, 3, 4)` | runs a test body on every rank of a pool (pytest plugin) |
| `run_ranks(fn, n, *args)` | runs a function on n fresh local ranks, outside pytest too |
| `rank_info()` | rank, world size and local rank of this process |
| `add_noise(module, scale, seed)` | seeded noise on every parameter, the same on all ranks |
| `tiny` | small models of many architectures whose sizes divide by 2, 3 and 4 |
| `parity` | is the split model the same as the whole one? |
| `count_collectives` | counts collectives and bytes (`plait.comm.count`) |
| `mutation` | shows that a check fails when the thing it checks is broken |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.comm import count as count_collectives
    from plait.run.environment import world as rank_info
    from plait.testing import mutation, parity, tiny
    from plait.testing.launch import run_ranks
    from plait.testing.noise import add_noise

__all__ = [
    "add_noise",
    "count_collectives",
    "mutation",
    "parity",
    "rank_info",
    "run_ranks",
    "tiny",
]

# Imported on first use: the pytest plugin lives in this package and is loaded in every pytest run,
# where it must cost nothing and must not import rooms before annotation checking is on.
_HOMES = {
    "add_noise": ("plait.testing.noise", "add_noise"),
    "count_collectives": ("plait.comm", "count"),
    "mutation": ("plait.testing.mutation", None),
    "parity": ("plait.testing.parity", None),
    "rank_info": ("plait.run.environment", "world"),
    "run_ranks": ("plait.testing.launch", "run_ranks"),
    "tiny": ("plait.testing.tiny", None),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    found = importlib.import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value
