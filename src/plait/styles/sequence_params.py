"""Parameters and row-parallel layers where activations are split along the sequence."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plait.comm import local
from plait.run import streams
from plait.styles import linear_forwards as forwards
from plait.styles.layer import border_of, rebind
from plait.styles.params import GradMode
from plait.styles.sequence import Part
from plait.styles.sequence_tokens import Tokens

_ROW = "_plait_tokens_row"


class WhileSplit(Mapping[str, GradMode]):
    """Gradient modes of parameters that are summed while they see a rank's tokens only.

    Args:
        tokens: Whether they do.
        names: The parameters.
        otherwise: Their modes at other times.
    """

    def __init__(
        self, tokens: Tokens, names: tuple[str, ...], otherwise: Mapping[str, GradMode]
    ) -> None:
        self.tokens, self.names, self.otherwise = tokens, names, otherwise

    def _now(self) -> Mapping[str, GradMode]:
        return self.otherwise if self.tokens.spread is None else dict.fromkeys(self.names, "sum")

    def __getitem__(self, name: str) -> GradMode:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def sum_gradients(module: nn.Module, tokens: Tokens) -> None:
    """Sum the gradients of a module's own parameters while it sees a rank's tokens only."""
    names = tuple(name for name, param in module._parameters.items() if param is not None)
    if names:
        border = border_of(module)
        # Read at each call as the dict that it stands for.
        border.grads = WhileSplit(tokens, names, border.grads)  # type: ignore[assignment]


def wrap_row(module: nn.Module, tokens: Tokens) -> None:
    """Let a row-parallel layer, called with all tokens, leave the rank's tokens of its sum."""
    module.__dict__[_ROW] = Part(
        tokens, module.__dict__.get("forward"), cuts_output=not forwards.is_rowwise(module)
    )
    rebind(module, _row_forward)


def _row_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    part: Part = module.__dict__[_ROW]
    tokens = part.tokens
    if tokens.spread is None:
        return part.call(module, *args, **kwargs)
    if part.cuts_output:
        return tokens.own(part.call(module, *args, **kwargs))
    output, bias = forwards.rowwise_term(module, args[0] if args else kwargs["input"])
    x = tokens.summed(output)
    streams.begin_own(tokens.mesh.get_local_rank(), streams.HELD)  # what follows is split
    return x if bias is None else x + local(bias, "sum", tokens.mesh).to(x.dtype)
