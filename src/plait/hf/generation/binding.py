"""Binds the split model's `generate` and the few methods it needs on the instance."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import surgery
from plait.errors import LayoutError, RankError
from plait.hf.generation import inputs, randomness
from plait.hf.generation.decisions import RankZeroScores, SilentStreamer, decide_at_rank_zero
from plait.hf.generation.head import HeadExchange, selection_of
from plait.hf.generation.messages import digest, exchange, global_ranks, report_failure
from plait.styles.kept import parameters_unchanged
from plait.styles.params import LocalParams
from plait.styles.sequence_tokens import whole_sequences

logger = logging.getLogger(__name__)

_STATE = "_plait_generation"


@dataclass
class Call:
    """One `generate` call in progress.

    Attributes:
        head: The border of the split head during the call; `None` where the head is whole.
        plain: transformers' own loop consumes the logits, and nothing of the user's sees them.
        user_processors: The user brought logits processors.
    """

    head: HeadExchange | None
    plain: bool
    user_processors: bool


@dataclass
class GenerationState:
    """What a split model remembers for `generate`. A copy of the model shares the mesh."""

    mesh: DeviceMesh
    call: Call | None = field(default=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GenerationState":
        return GenerationState(self.mesh)


def install(model: Any, tp_mesh: DeviceMesh) -> None:
    """Makes `model.generate` give the same tokens on all ranks of `tp_mesh`.

    Calling it again replaces the mesh. On a mesh of one rank, and for a model that can't generate,
    it does nothing.

    Args:
        model: A transformers model whose modules are split over `tp_mesh`.
        tp_mesh: The 1-D mesh of the tensor-parallel group.
    """
    if tp_mesh.size() == 1 or not hasattr(type(model), "_get_logits_processor"):
        return
    setattr(model, _STATE, GenerationState(tp_mesh))
    for name, function in _METHODS.items():
        setattr(model, name, MethodType(function, model))


def uninstall(model: Any) -> None:
    """Removes what `install` bound; the class's own methods show again."""
    for name in (*_METHODS, _STATE):
        vars(model).pop(name, None)


def _state(model: Any) -> GenerationState:
    state: GenerationState = getattr(model, _STATE)
    return state


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' `generate` on a split model: the same tokens on every rank of the group.

    Takes what the model's own `generate` takes, on every rank, and gives every rank the whole
    result. Random numbers are those of group rank 0, whose generator advances as in one process;
    the other ranks' generators are left as they were. Only group rank 0's streamer shows text.

    Raises:
        LayoutError: The ranks' inputs or arguments differ (raised on all of them).
        RankError: Another rank failed, or came to other tokens.

    Comm:
        Two `comm.exchange` per call, one more per step for time limits, stop strings and the
        user's own criteria; the collectives of the model's forward; at a split head per step one
        all-gather of candidates or, where they don't suffice, of the whole logits.
    """
    state, whole = _state(self), type(self).generate
    if state.call is not None:  # the model as its own assistant: its head must see everything
        state.call.plain = False
        if state.call.head is not None:
            state.call.head.selection = None
        return whole(self, *args, **kwargs)
    with surgery.settled(self):
        return _generate_first(self, state, whole, args, kwargs)


def _generate_first(
    self: Any, state: "GenerationState", whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    arguments = inputs.by_name(whole, self, args, kwargs)
    _refuse_paged(arguments)
    mesh, device = state.mesh, self.device
    is_first = mesh.get_local_rank() == 0
    streamer = arguments.get("streamer")
    sent = (
        inputs.describe(self, arguments),
        randomness.capture(device) if is_first else None,
        streamer is not None,
    )
    received = exchange("start of generate()", sent, mesh)
    inputs.compare([description for description, _, _ in received], mesh)
    if not is_first:
        arguments["streamer"] = SilentStreamer(streamer) if received[0][2] else None
    try:
        states = None if is_first else received[0][1]
        with (
            randomness.borrowed(states, device),
            _call(self, state, arguments),
            parameters_unchanged(),
            whole_sequences(),  # a step has one token: nothing to split
            LocalParams(self),  # a generate() of the model's own may use its bare parameters
        ):
            result = whole(self, **arguments)
    except BaseException as error:
        report_failure(error, mesh)
        raise
    _agree_on_result(result, mesh)
    return result


def _agree_on_result(result: Any, mesh: DeviceMesh) -> None:
    tokens = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    own = (tuple(tokens.shape), digest(tokens)) if isinstance(tokens, torch.Tensor) else None
    results = exchange("end of generate()", own, mesh)
    for rank, other in zip(global_ranks(mesh), results, strict=True):
        if other != results[0]:
            raise RankError(
                "generate() on a split model gives every rank the same tokens.",
                f"rank {rank} came to other tokens than rank {global_ranks(mesh)[0]} "
                f"(shapes {other and other[0]} and {results[0] and results[0][0]})",
                "run the ranks on the same kind of device, with the same library versions",
                rank=rank,
            )


def _refuse_paged(arguments: dict[str, Any]) -> None:
    config = arguments.get("generation_config")
    asked = arguments.get("cache_implementation", getattr(config, "cache_implementation", None))
    if asked == "paged":
        _refuse_continuous_batching(None)


def _refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise LayoutError(
        "Continuous batching (generate_batch, cache_implementation='paged') on a split model.",
        "its paged cache is laid out for all key/value heads; a rank holds only its own",
        "use generate() with a dynamic or static cache",
    )


@contextmanager
def _call(model: Any, state: GenerationState, arguments: dict[str, Any]) -> Iterator[None]:
    """Sets up the head's border and the watch on the model's output, and removes both."""
    lm_head = model.get_output_embeddings()
    head = HeadExchange(state.mesh) if lm_head is not None else None
    user_processors = bool(arguments.get("logits_processor")) or (
        arguments.get("prefix_allowed_tokens_fn") is not None
    )
    state.call = Call(head, _is_plain(model, lm_head, arguments), user_processors)
    watch = None
    if head is not None:
        lm_head._plait_output = head
        if state.call.plain:
            watch = model.register_forward_hook(_observe)
    try:
        yield
    finally:
        state.call = None
        if watch is not None:
            watch.remove()
        if lm_head is not None:
            vars(lm_head).pop("_plait_output", None)


def _is_plain(model: Any, lm_head: Any, arguments: dict[str, Any]) -> bool:
    from transformers import GenerationMixin

    own_loop = type(model).generate is not GenerationMixin.generate
    given = any(
        arguments.get(name) is not None
        for name in ("custom_generate", "assistant_model", "prefix_allowed_tokens_fn")
    )
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    hooked = any(
        # a user's hook would see -inf where it expects logits
        not getattr(hook, "__module__", "").startswith("plait.")
        for module in (model, lm_head)
        if module is not None
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    return not (own_loop or given or compiled or hooked)


def _observe(model: Any, args: Any, output: Any) -> None:
    call = _state(model).call
    if call is not None and call.head is not None:
        call.head.observe(output)


def _get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' list of logits processors; also the moment when the head learns its mode."""
    processors = type(self)._get_logits_processor(self, *args, **kwargs)
    state = _state(self)
    call = state.call
    if call is None:
        return processors
    config = kwargs.get("generation_config", args[0] if args else None)
    if call.head is not None:
        call.head.selection = _selection(call, config, processors)
    if call.user_processors:
        processors.append(RankZeroScores(state.mesh))
    return processors


def _selection(call: Call, config: Any, processors: Any) -> Any:
    from transformers.generation import GenerationMode

    if not call.plain or call.user_processors or config is None:
        return None
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return None
    if config.output_scores or config.output_logits:
        return None
    return selection_of(processors, bool(config.do_sample))


def _get_stopping_criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' stopping criteria, those that could differ between ranks left to rank 0."""
    criteria = type(self)._get_stopping_criteria(self, *args, **kwargs)
    state = _state(self)
    return criteria if state.call is None else decide_at_rank_zero(criteria, state.mesh)


def _get_static_cache_init_shape(self: Any) -> None:
    """Lets a static cache take its shape from the first keys, which are this rank's own heads."""
    return None


def _valid_auto_compile_criteria(self: Any, model_kwargs: Any, generation_config: Any) -> bool:
    """Never compiles by itself: the borders between ranks are plain Python."""
    if generation_config.compile_config is not None:
        logger.warning("generate() on a split model ignores compile_config and runs uncompiled.")
    return False


_METHODS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "generate_batch": _refuse_continuous_batching,
    "init_continuous_batching": _refuse_continuous_batching,
    "_get_logits_processor": _get_logits_processor,
    "_get_stopping_criteria": _get_stopping_criteria,
    "_get_static_cache_init_shape": _get_static_cache_init_shape,
    "_valid_auto_compile_criteria": _valid_auto_compile_criteria,
}
