"""Activations split along the sequence between tensor-parallel regions, at run time.

The forwards of a list of blocks, of its blocks, of the regions in them and of their row-parallel
layers are wrapped. They share one `Tokens`, which knows how the tokens lie on the ranks while the
blocks run; while it knows nothing, every one of them does what it did before.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), section 4.2.2.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from plait.plan.sequence import BY_TOKEN
from plait.run import torch_private
from plait.styles.attention import positional
from plait.styles.layer import first_input, rebind
from plait.styles.randomness import split_randomness, whole_randomness
from plait.styles.sequence_tokens import Tokens, sequences_are_whole, whole_sequences


@dataclass
class Part:
    """What a wrapped module needs at each call.

    Attributes:
        tokens: Shared by the whole list.
        forward: A forward that was set on the instance, or None: the class's.
        is_first: A block: whether it is the first one of the list.
        is_last: A block: the last one.
        cuts_output: A region: whether its output is whole.
        sums_output: A region: whether its output is a term of a sum.
        leaves_term: A layer in a region: whether it leaves such a term.
        by_token: A block: arguments with a row for every token beside the hidden states, and their
            places.
    """

    tokens: Tokens
    forward: Callable[..., Any] | None
    is_first: bool = False
    is_last: bool = False
    cuts_output: bool = False
    sums_output: bool = False
    leaves_term: bool = False
    by_token: Mapping[str, int] = field(default_factory=dict)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module had before."""
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)


_OWNER, _BLOCK, _REGION = "_plait_tokens_owner", "_plait_tokens_block", "_plait_tokens_region"


def wrap_owner(module: nn.Module, lists: list[Tokens]) -> None:
    """Let the forward of a module open its lists of blocks; of the whole model, with none."""
    if _OWNER in module.__dict__:
        module.__dict__[_OWNER][1].extend(lists)
        return
    module.__dict__[_OWNER] = [module.__dict__.get("forward"), list(lists)]
    rebind(module, _owner_forward)


def wrap_block(module: nn.Module, tokens: Tokens, *, is_first: bool, is_last: bool) -> None:
    """Make a block one of a list: it is called with a rank's tokens, the first one with all."""
    forward = module.__dict__.get("forward")
    takes = positional(type(module).forward)
    by_token = {name: takes.index(name) for name in BY_TOKEN if name in takes}
    module.__dict__[_BLOCK] = Part(tokens, forward, is_first, is_last, by_token=by_token)
    rebind(module, _block_forward)


def wrap_region(
    module: nn.Module, tokens: Tokens, *, cuts_output: bool, sums_output: bool = False
) -> None:
    """Call a module with all tokens."""
    forward = module.__dict__.get("forward")
    module.__dict__[_REGION] = Part(
        tokens, forward, cuts_output=cuts_output, sums_output=sums_output
    )
    rebind(module, _region_forward)


def _owner_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward, lists = module.__dict__[_OWNER]
    inner = forward if forward is not None else partial(type(module).forward, module)
    is_on = not sequences_are_whole() and not _shows_blocks(module, kwargs)
    before = [(t.is_open, t.spread) for t in lists]
    for tokens in lists:
        tokens.is_open, tokens.spread = is_on, None
        if torch.is_grad_enabled():
            tokens.recorded.add(is_on)
    try:
        with contextlib.nullcontext() if is_on else whole_sequences():
            output = inner(*args, **kwargs)
        for tokens in lists:
            if tokens.spread is not None:
                raise tokens.refusal("the last block of the list was not called")
        return output
    finally:
        for tokens, (is_open, spread) in zip(lists, before, strict=True):
            tokens.is_open, tokens.spread, tokens.latest = is_open, spread, None


def _shows_blocks(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants what every block gives, or some blocks may be left out."""
    asked = kwargs.get("output_hidden_states")
    if asked is None:
        asked = getattr(module.__dict__.get("config"), "output_hidden_states", False)
    left_out = module.training and bool(getattr(module, "layerdrop", 0.0))
    return bool(asked or left_out)


def _block_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    part: Part = module.__dict__[_BLOCK]
    tokens = part.tokens
    if tokens.spread is None:
        if not tokens.is_open and not _is_again(tokens):
            return part.call(module, *args, **kwargs)
        x, put = first_input(module, args, kwargs)
        if tokens.is_open or part.is_first:
            args, kwargs = put(tokens.cut(x))
        else:  # recomputed by other means than the block's own
            tokens.ask(x)
    if part.by_token:
        args, kwargs = _own_arguments(part, args, kwargs)
    spread, goes_on = tokens.spread, False
    try:
        with _recomputing(module, tokens), split_randomness(tokens.mesh):
            output = part.call(module, *args, **kwargs)
        if part.is_last:
            return _first_of(output, tokens.joined)
        goes_on = tokens.is_open
        return output
    finally:
        tokens.spread, tokens.latest = spread if goes_on else None, None


def _is_again(tokens: Tokens) -> bool:
    """Whether a block is called to repeat, in the backward, what it did with a rank's tokens.

    Raises:
        PlanError: Nothing tells.
    """
    if True not in tokens.recorded or not torch_private.in_backward():
        return False
    if False in tokens.recorded:
        raise tokens.refusal(
            "a block is computed again in the backward, and forwards with gradients have run both "
            "with split tokens and without (output_hidden_states=True)",
            "model.gradient_checkpointing_enable(), which tells them apart",
        )
    return True


def _own_arguments(part: Part, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A block's arguments, those with a row for every token cut to the rank's."""
    places = set(part.by_token.values())

    def cut(x: Any) -> Any:
        return part.tokens.own(x) if isinstance(x, torch.Tensor) else x

    args = tuple(cut(x) if place in places else x for place, x in enumerate(args))
    return args, {name: cut(x) if name in part.by_token else x for name, x in kwargs.items()}


@contextlib.contextmanager
def _recomputing(module: nn.Module, tokens: Tokens) -> Iterator[None]:
    """Let what a block of transformers computes again in the backward find the tokens as now."""
    attributes, name = module.__dict__, "_gradient_checkpointing_func"
    again = attributes.get(name)
    if again is None or not (attributes.get("gradient_checkpointing") and module.training):
        yield
        return
    spread = tokens.spread

    def within(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, tokens.spread = tokens.spread, spread
        try:
            return function(*args, **kwargs)
        finally:
            tokens.spread, tokens.latest = before, None

    attributes[name] = lambda function, *args, **kwargs: again(
        partial(within, function), *args, **kwargs
    )
    try:
        yield
    finally:
        attributes[name] = again


def _region_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    part: Part = module.__dict__[_REGION]
    tokens = part.tokens
    if tokens.spread is None:
        return part.call(module, *args, **kwargs)
    x, _ = first_input(module, args, kwargs)
    whole = tokens.gathered(x)
    args = tuple(whole if given is x else given for given in args)
    kwargs = {name: whole if given is x else given for name, given in kwargs.items()}
    with whole_randomness(tokens.mesh):
        output = part.call(module, *args, **kwargs)
    if part.sums_output:
        return _first_of(output, tokens.summed)
    return _first_of(output, tokens.own) if part.cuts_output else output


def _first_of(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A module's output, its hidden states changed."""
    if isinstance(output, tuple | list) and output:
        return type(output)([change(output[0]), *output[1:]])
    return change(output)
