"""Parameters and row-parallel layers where activations are split along the sequence."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from plait.comm import local
from plait.run import streams
from plait.styles import linear_forwards as forwards
from plait.styles.experts import MoeExpertsParallel
from plait.styles.layer import Border, border_of, hooks_are, rebind
from plait.styles.linear import RowwiseParallel
from plait.styles.linear_kinds import is_conv1d
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


def _is_plain_row(module: nn.Module) -> bool:
    """Whether a module has one of the fused forwards, so that `rowwise_term` is its term."""
    border: Border | None = module.__dict__.get("_plait_border")
    if border is None:
        return False
    style = border.style
    return (
        isinstance(style, RowwiseParallel)
        and hooks_are(style, RowwiseParallel)
        and isinstance(style.output_layouts, Replicate)
        and style.use_local_output
        and border.forward is None
        and (type(module).forward is nn.Linear.forward or is_conv1d(module))
    )


def wrap_row(module: nn.Module, tokens: Tokens) -> None:
    """Let a row-parallel layer, called with all tokens, leave the rank's tokens of its sum."""
    module.__dict__[_ROW] = Part(
        tokens, module.__dict__.get("forward"), cuts_output=not _is_plain_row(module)
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


def can_leave_term(module: nn.Module) -> bool:
    """Whether `wrap_term` knows how to leave out the sum of a module."""
    border = module.__dict__.get("_plait_border")
    is_experts = border is not None and type(border.style) is MoeExpertsParallel
    return is_experts or _is_plain_row(module)


def wrap_term(module: nn.Module, tokens: Tokens) -> None:
    """Let experts, or a row-parallel layer beside them, leave a term of the sum of all ranks."""
    is_row = _is_plain_row(module)
    before = module.__dict__.get("forward")
    module.__dict__[_ROW] = Part(tokens, before, cuts_output=not is_row, leaves_term=True)
    rebind(module, _term_forward)


def _term_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    part: Part = module.__dict__[_ROW]
    mesh = part.tokens.mesh
    if part.tokens.spread is None:
        return part.call(module, *args, **kwargs)
    if part.cuts_output:  # experts
        border = border_of(module)
        args, kwargs = border.style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with border.style.context_around_forward(module, mesh):
            return border.call(module, *args, **kwargs)
    output, bias = forwards.rowwise_term(module, args[0] if args else kwargs["input"])
    if bias is None:
        return output
    once = local(bias, "sum", mesh) * float(mesh.get_local_rank() == 0)
    return output + once.to(output.dtype)


def follow_tokens(base: nn.Module, module: nn.Module) -> None:
    """Sum the gradients of what scales a row-parallel layer's output, if that is a rank's tokens.

    Args:
        base: The layer.
        module: Holds the parameters that act on its output.
    """
    part: Part | None = base.__dict__.get(_ROW)
    if part is not None and not isinstance(border_of(module).grads, WhileSplit):
        sum_gradients(module, part.tokens)


def follow_copied(original: nn.Module, copied: nn.Module) -> None:
    """Sum the gradients of a copy of a module where those of the module are summed.

    Args:
        original: The module.
        copied: A copy that is called in its place, with the same tokens.
    """
    before, after = (part.__dict__.get("_plait_border") for part in (original, copied))
    if before is not None and after is not None and isinstance(before.grads, WhileSplit):
        known = before.grads
        after.grads = WhileSplit(known.tokens, known.names, known.otherwise)


def follow_row(base: nn.Module, first: nn.Module, second: nn.Module) -> None:
    """Let two factors beside a row-parallel layer leave what the layer leaves.

    Args:
        base: The layer. Where its activations are not split along the sequence, nothing is done.
        first: The factor on the layer's input, row-parallel as the layer.
        second: The factor on the first one's output, whole on every rank.
    """
    part: Part | None = base.__dict__.get(_ROW)
    if part is None or _ROW in first.__dict__:
        return
    wrap = wrap_term if part.leaves_term else wrap_row
    wrap(first, part.tokens)
    sum_gradients(second, part.tokens)
