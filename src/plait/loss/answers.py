"""What a function of torch does with split logits: on slices where it can, else on the whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from plait.errors import PlaitError
from plait.loss import losses, over_vocabulary, pointwise, views
from plait.loss.gathered import version_of
from plait.loss.labels import Labels, Placeholder, plain
from plait.loss.logits import SplitLogits
from plait.loss.naming import attributes, functions

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func(*args, **kwargs)`, some of whose arguments are split logits."""
    if func in _OF_THE_WRAPPER:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _OF_THE_GRAPH:
        return _OF_THE_GRAPH[func](func, args, kwargs)
    args, kwargs = tree_map_only(SplitLogits, SplitLogits.settled, (args, kwargs))
    found = _ANSWERS.get(func)
    if found is not None and _holds_split(args, kwargs):
        result = found(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return _of_whole(func, args, kwargs)


def _holds_split(*values: Any) -> bool:
    return any(isinstance(x, SplitLogits) for x in tree_flatten(values)[0])


def _of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the whole; what is changed there comes back to the slices."""
    if isinstance(kwargs.get("out"), SplitLogits):
        raise PlaitError(
            f"{_name(func)}(…, out=split logits):",
            "its memory holds a slice of the vocabulary",
            "let the function make its own output",
        )
    used: list[tuple[SplitLogits, Tensor, int]] = []

    def whole(x: SplitLogits) -> Tensor:
        found = x.whole()
        used.append((x, found, version_of(found)))
        return found

    args, kwargs = tree_map_only(SplitLogits, whole, (args, kwargs))
    args, kwargs = tree_map_only((Labels, Placeholder), plain, (args, kwargs))
    result = func(*args, **kwargs)
    for x, found, version in used:
        changes = pointwise.changes_first(func) or bool(kwargs.get("inplace"))
        unseen = found.is_inference() and changes and found is args[0]
        if unseen or version_of(found) != version:
            x.gathered.settle(found if unseen else None)
            if result is found:
                return x
    return result


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is asked about the graph is the slice's."""
    return func(*tree_map_only(SplitLogits, lambda x: x.local, args), **kwargs)


def _own_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0].local.grad
    return None if grad is None else args[0].like(grad)


def _hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook on the gradient gets it as split logits, and may give it back so or whole."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    vocabulary, dim = x.vocabulary, x.vocabulary_dim

    def on_slice(grad: Tensor) -> Tensor | None:
        given = hook(SplitLogits.of(grad, vocabulary, dim))
        if given is None or not isinstance(given, Tensor):
            return None
        return given.local if isinstance(given, SplitLogits) else vocabulary.split(given, dim)

    return x.local.register_hook(on_slice)


def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(args[0].local.detach())


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`: with respect to split logits a gradient is split as they are."""
    given = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
    inputs = given["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    given["inputs"] = [x.local if isinstance(x, SplitLogits) else x for x in inputs]
    given = tree_map_only(SplitLogits, SplitLogits.whole, given)
    return tuple(
        x.like(grad) if isinstance(x, SplitLogits) and grad is not None else grad
        for x, grad in zip(inputs, func(**given), strict=True)
    )


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = next((x for x in _REFUSED.split() if getattr(Tensor, x) is func), "data or grad = …")
    raise PlaitError(
        f"{name} on split logits:",
        "this rank holds a slice of them",
        ["logits = logits.whole()", "output_logits=True in the call of the model: whole logits"],
    )


_REFUSED = "set_ resize_ resize_as_ requires_grad_ detach_ share_memory_"
_GRAPH = "requires_grad grad_fn is_leaf output_nr _version retains_grad"

_OF_THE_WRAPPER: frozenset[Any] = frozenset(
    attributes(
        "shape dtype device ndim layout is_cuda is_cpu is_meta is_mps is_xpu is_sparse names "
        "is_quantized is_mkldnn is_nested itemsize nbytes is_sparse_csr"
    )
    + functions(
        "size dim ndimension numel nelement element_size is_floating_point is_complex stride "
        "is_signed storage_offset is_contiguous is_inference get_device __len__ __hash__ is_conj "
        "is_neg"
    )
)

_OF_THE_GRAPH: dict[Any, Answer] = {
    **dict.fromkeys(attributes(_GRAPH) + functions("retain_grad _is_view"), _of_local),
    **dict.fromkeys(
        functions(_REFUSED) + attributes("data grad requires_grad", "__set__"), _refused
    ),
    **dict.fromkeys(attributes("grad"), _own_grad),
    Tensor.register_hook: _hook,
    torch.autograd.grad: _gradients,
}

_ANSWERS: dict[Any, Answer] = {
    **pointwise.ANSWERS,
    **views.ANSWERS,
    **over_vocabulary.ANSWERS,
    **losses.ANSWERS,
    **dict.fromkeys(attributes("data"), _data),
}
