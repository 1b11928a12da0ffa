"""`resize_token_embeddings` of a split model: the model's own, on whole tables, then cut again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait import surgery
from plait.errors import RankError
from plait.hf.generation.randomness import borrowed, capture
from plait.state import ParallelState, gather_whole, state_of
from plait.surgery.adopting import cut_plain
from plait.surgery.loading import layout_of
from plait.surgery.planned import planned_styles
from plait.surgery.watching import is_root
from plait.surgery.wrappers import look
from plait.weights.outcome import meet


def resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> Any:
    """The model's own `resize_token_embeddings`, for a split model; all ranks must call it.

    Embedding and head are gathered, resized as in one process with the random numbers of the first
    rank, and cut again: new rows are the same on all ranks, and those of one process. Their
    parameters are new objects, so make the optimizer afterwards.

    Args:
        model: The split model (bound: `model.resize_token_embeddings(n)`).
        new_num_tokens: The number of tokens wanted; None asks for the embedding alone.
        pad_to_multiple_of: Padding of that number.
        mean_resizing: Whether new rows are drawn around the mean of the old ones.

    Returns:
        The input embedding.

    Raises:
        PlaitError: Another number is asked of a part of the split model.
        RankError: The ranks ask for different numbers. Nothing has been changed.

    Comm:
        None where no number is asked, one control message where nothing would change. Else two
        control messages, and one all-gather for each split table; a rank holds the whole tables
        while it works.
    """
    embedding = model.get_input_embeddings()
    current = embedding.weight.shape[0]
    wanted = current if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted += -wanted % pad_to_multiple_of
    asked = f"resize_token_embeddings({wanted})"
    is_asked = new_num_tokens is not None or pad_to_multiple_of
    if wanted == current and not (is_asked and is_root(model)):
        return embedding
    surgery.refuse_part(model, asked)
    surgery.refuse_sharded(model, asked)
    state = state_of(model)
    assert state is not None
    _agree(f"{asked} of a split model:", (wanted, mean_resizing), state)
    if wanted == current:
        return embedding
    surgery.adopt(model)
    first = state.tp_mesh.get_local_rank() == 0
    device = model.device
    states = meet(state.tp_mesh, "random numbers", capture(device) if first else None)[0]
    with _whole_tables(model), _own_methods(model), borrowed(None if first else states, device):
        head = model.get_output_embeddings()
        type(model).resize_token_embeddings(
            model, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        _keep_head(model, head)
        wrapped = look(model)
        styles = planned_styles(asked, model, state, wrapped) | wrapped.styles(state)
        cut_plain(model, state, styles, wrapped)
        wrapped.finish(model, state)
    return model.get_input_embeddings()


def _agree(asked: str, own: tuple[int, bool], state: ParallelState) -> None:
    told = meet(state.tp_mesh, "resize_token_embeddings", own, asked=asked)
    if any(other != told[0] for other in told):
        ranks = state.tp_mesh.mesh.flatten().tolist()
        raise RankError(
            asked,
            [
                f"rank {rank} asks for {number} tokens, mean_resizing={mean}"
                for rank, (number, mean) in zip(ranks, told, strict=True)
            ],
            "give the same arguments on all ranks",
        )


@contextmanager
def _whole_tables(model: Any) -> Iterator[None]:
    """Embedding and head, and whatever is tied to them, as plain whole parameters.

    Left with an exception, the model is as it was.
    """
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = [part for part in both if part is not None]
    tables = {id(p) for part in ends for p in part._parameters.values() if p is not None}
    parts = list(model.modules())
    before = [(part, dict(part._parameters), dict(part._modules)) for part in parts]
    plain = [(part, _attributes(part)) for part in parts]
    config = model.config.get_text_config()
    number = getattr(config, "vocab_size", None)
    whole: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for part in parts:
            for name, param in part._parameters.items():
                if isinstance(param, DTensor) and id(param) in tables:
                    if id(param) not in whole:
                        layout = layout_of(name, param)
                        x = gather_whole(param._local_tensor, layout, param.device_mesh)
                        x = x.clone() if x is param._local_tensor else x
                        whole[id(param)] = nn.Parameter(x, param.requires_grad)
                    part._parameters[name] = whole[id(param)]
    try:
        yield
    except BaseException:
        for part, params, children in before:
            part._parameters.clear()
            part._parameters.update(params)
            part._modules.clear()
            part._modules.update(children)
        for part, attributes in plain:
            part.__dict__.update(attributes)
        if number is not None:
            config.vocab_size = number
        raise


_NUMBERS = ("num_embeddings", "padding_idx", "out_features", "vocab_size")


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: part.__dict__[name] for name in _NUMBERS if name in part.__dict__}


@contextmanager
def _own_methods(model: Any) -> Iterator[None]:
    """Models inside the model resize by their class's method, as the whole does here."""
    bound = [
        (part, part.__dict__.pop("resize_token_embeddings"))
        for part in model.modules()
        if "resize_token_embeddings" in part.__dict__
    ]
    try:
        yield
    finally:
        for part, method in bound:
            part.__dict__["resize_token_embeddings"] = method


def _keep_head(model: Any, head: nn.Module | None) -> None:
    """Put the resized parameters into the head that was there, whose border and hooks stay."""
    new = model.get_output_embeddings()
    if head is None or new is head or not isinstance(head, nn.Linear):
        return
    for name, param in new._parameters.items():
        head._parameters[name] = param
    head.out_features = new.out_features
    for part in model.modules():
        for name, child in part._modules.items():
            if child is new:
                part._modules[name] = head
