"""When a model's logits stay split: a call with labels, or inside `split_logits`."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map_only

from plait.loss.labels import Labels, Placeholder, Record
from plait.loss.logits import SplitLogits
from plait.loss.reduction import OTHERS, TOKENS
from plait.loss.vocabulary import Vocabulary
from plait.plan import words
from plait.run.around import split_module

LABELS = frozenset(
    ("labels", "shift_labels", "start_positions", "end_positions", "next_sentence_label")
    + ("sentence_order_label", "label", "target", "targets")
)
"""Arguments of a forward that are what its loss is measured against."""

WHOLE = "output_logits"
"""Argument of a call with labels that asks for whole logits; the model does not see it."""

ITEMS = "num_items_in_batch"
"""Argument of a forward that its loss is divided by: the number of all ranks."""

ALONE = "_plait_alone"
"""Attribute of a model whose forwards do not talk to other data ranks for a while."""

_SPLIT = "_plait_split_logits"  # on a head: its output stays split in this call
_WANTED = "_plait_wants_split_logits"  # on a model: inside split_logits
_COUNT = "_plait_last_count"
_LOSS = "_plait_last_loss"  # on a model, and in the graph where its last loss is: the same mark
_NEAR = 200


@contextmanager
def split_logits(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the logits of a split model stay split, for a loss of your own.

    Without it they do so in calls with labels only. A cross entropy of these logits (that of torch
    or [`plait.loss.cross_entropy`][plait.loss.cross_entropy]) is then over the whole vocabulary,
    and over the tokens of all data ranks.

    Args:
        model: The model that was split; one that is not stays as it is.

    Comm: none.
    """
    inside = split_module(model).__dict__
    before = inside.get(_WANTED, False)
    inside[_WANTED] = True
    try:
        yield model
    finally:
        inside[_WANTED] = before


def last_count(model: nn.Module) -> int | None:
    """Over how many tokens, of all data ranks, the loss of the model's last call with labels is.

    Args:
        model: The model that was split.

    Returns:
        The number; None where no call has computed a cross entropy. Of several losses of one call
        the largest number.

    Comm: none.
    """
    count: Tensor | None = split_module(model).__dict__.get(_COUNT)
    return None if count is None else int(count)


def is_made_of(loss: Tensor, model: nn.Module) -> bool:
    """Whether a loss is computed from the one that a model returned last, if it returned one.

    Args:
        loss: With a graph.
        model: The model that was split.
    """
    wanted = split_module(model).__dict__.get(_LOSS)
    if wanted is None:
        return True  # it returned none that is known
    found: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while found and len(seen) < _NEAR:
        node = found.pop(0)
        if node is not None and node.metadata.get(_LOSS) is wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            found += [below for below, _ in node.next_functions]
    return False


class Request:
    """What one head is asked for in one call: its output split.

    Args:
        data_mesh: The ranks that see other tokens, for a loss that the model does not compute.
    """

    __slots__ = ("data_mesh",)

    def __init__(self, data_mesh: DeviceMesh | None) -> None:
        self.data_mesh = data_mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "Request":
        return self


def asked_of(module: nn.Module) -> Request | None:
    """What this head is asked for in the call that runs, or None."""
    return module.__dict__.get(_SPLIT)


def split_output(
    x_local: Tensor, sizes: Sequence[int], mesh: DeviceMesh, request: Request
) -> SplitLogits:
    """A head's output, as asked.

    Args:
        x_local: `[..., vocab_local]`, this rank's slice.
        sizes: The slices' widths.
        mesh: The axis.
        request: What `asked_of` gave.

    Comm: none; where something else than a loss uses it, one all-gather.
    """
    return SplitLogits.of(x_local, Vocabulary.over(sizes, mesh), data_mesh=request.data_mesh)


def call(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data_mesh: DeviceMesh | None,
) -> Any:
    """Run the forward of a split model; with labels its loss is that of all ranks' tokens.

    Args:
        module: The model.
        forward: Its forward.
        args: What it is called with.
        kwargs: The same, by name; `output_logits=True` asks for whole logits.
        data_mesh: The ranks that see other tokens, or None.

    Raises:
        PlaitError: The data ranks were given different `num_items_in_batch`.

    Comm: that of the forward and of [`cross_entropy`][plait.loss.cross_entropy].
    """
    if torch.compiler.is_compiling():
        kwargs = {n: x for n, x in kwargs.items() if n != WHOLE}  # logits are whole anyway
        if data_mesh is None or not _may_have_labels(module, args, kwargs):
            return forward(*args, **kwargs)
        return _call_apart(module, forward, args, kwargs, data_mesh)
    return _call(module, forward, args, kwargs, data_mesh)


def _may_have_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = any(kwargs.get(name) is not None for name in LABELS)
    idle = any(isinstance(x, Placeholder) for x in (*args, *kwargs.values()))
    return named or idle or len(args) > 1 or bool(module.__dict__.get(_WANTED, False))


def _call(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data_mesh: DeviceMesh | None,
) -> Any:
    """As `call`, not compiled."""
    names = _names(type(module).forward)
    whole = bool(kwargs.pop(WHOLE, False)) if WHOLE in kwargs and WHOLE not in names else False
    wanted = module.__dict__.get(_WANTED, False)
    given = [n for n in LABELS & kwargs.keys() if isinstance(kwargs[n], Tensor)]
    places = [i for i, n in enumerate(names[: len(args)]) if n in LABELS]
    places = [i for i in places if isinstance(args[i], Tensor)]
    idle = any(isinstance(x, Placeholder) for x in tree_flatten((args, kwargs))[0])
    if idle:
        args, kwargs = tree_map_only(Placeholder, Placeholder.plain, (args, kwargs))
    if not (given or places or wanted):
        return forward(*args, **kwargs)
    data_mesh = None if module.__dict__.get(ALONE) else data_mesh
    by_place = dict(zip(names, args, strict=False))
    record = Record(data_mesh, idle=idle, num_items=kwargs.get(ITEMS, by_place.get(ITEMS)))
    kwargs = {n: _labels(x, record) if n in given else x for n, x in kwargs.items()}
    args = tuple(_labels(x, record) if i in places else x for i, x in enumerate(args))
    split = [] if whole else heads(module)
    request = Request(data_mesh if wanted else None)
    before = [(head, head.__dict__.get(_SPLIT)) for head in split]
    for head in split:
        head.__dict__[_SPLIT] = request
    try:
        output = forward(*args, **kwargs)
    finally:
        for head, value in before:
            head.__dict__[_SPLIT] = value
    if record.counts:
        _note(module, output, record)
    elif data_mesh is not None and (given or places):
        _warn(module, output, data_mesh)
    return _as_split(output, request) if wanted and not whole and data_mesh is not None else output


_call_apart = torch.compiler.disable(
    _call,
    reason="the loss of a call with labels is a sum over the data ranks, which plait computes "
    "outside of the graph; without fullgraph=True the call runs uncompiled; compile the layers of "
    "the model instead (layer.compile())",
)


def _labels(x: Tensor, record: Record) -> Tensor:
    return x if type(x) is not Tensor else Labels.of(x, record)


@lru_cache(maxsize=1024)
def _names(forward: Any) -> tuple[str, ...]:
    """Names of the arguments of a forward that may be given by position, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in found if p.kind in kinds)[1:]


def heads(module: nn.Module) -> list[nn.Module]:
    """The modules whose outputs are logits: those that a model of transformers names, or by name.

    Args:
        module: The model.
    """
    named = getattr(module, "get_output_embeddings", None)
    if callable(named):
        head = named()
        return list(head.modules()) if isinstance(head, nn.Module) else []
    return [part for name, part in module.named_modules() if _word(name) in words.HEADS]


def _word(name: str) -> str:
    parts = [part for part in name.split(".") if not part.isdigit()]
    return parts[-1] if parts else ""


def _note(module: nn.Module, output: Any, record: Record) -> None:
    """Remember of how many tokens the loss is, on the model and on the loss that it returns."""
    count = record.counts[0]
    if len(record.counts) > 1:
        count = torch.stack([x.to(count.device) for x in record.counts]).amax()
        count.__dict__[OTHERS] = tuple(record.counts)
    module.__dict__[_COUNT] = count
    loss = _loss_of(output)
    module.__dict__[_LOSS] = None
    node: Any = None if loss is None else loss.grad_fn
    if node is not None:
        # A mark, not the node: that would keep the graph, and could not be copied with the model.
        node.metadata[_LOSS] = module.__dict__[_LOSS] = object()
    if loss is not None:
        loss.__dict__[TOKENS] = count


def _loss_of(output: Any) -> Tensor | None:
    """The loss among what a model returns, where it is found."""
    loss = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    loss = output.get("loss") if isinstance(output, dict) else loss
    loss = output if isinstance(output, Tensor) else loss
    return loss if isinstance(loss, Tensor) and not loss.ndim else None


def _warn(module: nn.Module, output: Any, data_mesh: DeviceMesh) -> None:
    """Say once for each class of model that its loss is that of a rank's own samples."""
    loss = _loss_of(output)
    kind = next(x for x in type(module).__mro__ if not x.__name__.startswith("FSDP"))
    if loss is None or not loss.requires_grad or kind in _WARNED or data_mesh.get_local_rank():
        return
    _WARNED.add(kind)
    warnings.warn(
        f"The loss of {kind.__name__} is none of torch's losses over its labels with a mean or a "
        "sum, so on several data ranks it is that of each rank's own samples, and gradients are "
        "the mean over the ranks. With equal numbers of samples (or tokens) on every rank that is "
        "right. Else let the model return a loss with reduction='mean', or leave labels out of "
        "the call and compute the loss inside plait.loss.split_logits(model).",
        UserWarning,
        stacklevel=2,
    )


_WARNED: set[type] = set()


def _as_split(output: Any, request: Request) -> Any:
    """Whole logits as split ones of one slice, so that a loss of them is of all data ranks."""
    logits = getattr(output, "logits", None)
    if type(logits) is Tensor and logits.ndim > 1 and logits.is_floating_point():
        one = Vocabulary((logits.shape[-1],))
        output.logits = SplitLogits.of(logits, one, data_mesh=request.data_mesh)
    return output
