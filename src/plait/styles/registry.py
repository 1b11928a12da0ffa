"""The registry of styles: the authoritative list of the names that a plan may use."""

import difflib
from collections.abc import Iterator, Mapping

from plait.errors import PlanError
from plait.styles.layer import TensorParallelLayer


class ParallelInterface(Mapping[str, TensorParallelLayer]):
    """A mapping of style names to styles that grows by `register`."""

    def __init__(self) -> None:
        self._styles: dict[str, TensorParallelLayer] = {}

    def register(self, name: str, style: TensorParallelLayer) -> None:
        """Make `style` known as `name`; a name that exists is replaced.

        Args:
            name: The name that plans use.
            style: An instance of a `TensorParallelLayer` subclass.

        Raises:
            PlanError: `style` is a class or not a style.
        """
        if not isinstance(style, TensorParallelLayer):
            raise PlanError(
                f"register({name!r}, {style!r}):",
                f"{style!r} is not an instance of a TensorParallelLayer subclass",
                f"ALL_PARALLEL_STYLES.register({name!r}, MyStyle()), with the brackets",
            )
        self._styles[name] = style

    def __getitem__(self, name: str) -> TensorParallelLayer:
        if name not in self._styles:
            near = difflib.get_close_matches(name, self._styles, n=3)
            raise KeyError(f"no style {name!r}; closest: {near}, all: {sorted(self._styles)}")
        return self._styles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)

    def __repr__(self) -> str:
        return f"ParallelInterface({sorted(self._styles)})"


ALL_PARALLEL_STYLES = ParallelInterface()
"""Every style that plans may name. Registered at import by the style files, and by users."""
