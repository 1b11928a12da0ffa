"""`generate()` of a split model: transformers' own loop, made the same on every rank.

`install` binds a handful of methods on the model instance. Nothing is patched on a class or in
transformers, so a second model in the same process, and the assistant of an assisted decoding,
stay as they were. What the methods add to transformers' generate:

- `inputs`: inputs and arguments are the same on all ranks, else a `LayoutError` before any work.
- `randomness`: random numbers come from group rank 0; afterwards every rank has its own again.
- `decisions`: time limits, stop strings, users' criteria and processors: group rank 0 decides.
- `messages`: a failure, or a different result, on one rank becomes an error on all.
- `head`: the best candidates are exchanged instead of the whole vocabulary where that is exact.
"""

from plait.hf.generation.binding import install, uninstall
from plait.hf.generation.head import HeadExchange

__all__ = ["HeadExchange", "install", "uninstall"]
