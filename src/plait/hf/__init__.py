"""Everything that knows a name of transformers: configs, classes, conversion tables, generation.

transformers is imported inside functions only: plain modules are split without it.
"""

from typing import Any


def auto_class(name: str) -> Any:
    """The auto class of transformers with this name."""
    import transformers

    return getattr(transformers, name)


__all__ = ["auto_class"]
