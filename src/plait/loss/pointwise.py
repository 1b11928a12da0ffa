"""Functions that act on every logit by itself: each rank's slice is enough."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from plait.loss.labels import plain
from plait.loss.logits import SplitLogits
from plait.loss.naming import functions

_NAMES = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder rsub neg negative "
    "pow square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log1p tanh sigmoid abs absolute relu "
    "clamp clip clamp_min clamp_max minimum maximum fmin fmax where masked_fill nan_to_num lerp "
    "addcmul addcdiv sign logsigmoid softplus gelu silu hardtanh isnan isinf isfinite "
    "eq ne lt le gt ge logical_and logical_or logical_not"
)
_OPERATORS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "__neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __div__ __rdiv__ "
    "__floordiv__ __invert__ __and__ __or__"
)
_IN_PLACE = "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__"
_CASTS = "float double half bfloat16 to type type_as contiguous detach clone cpu cuda positive"


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of numbers that meet each other by torch's rules of broadcasting."""
    values = (*args, *kwargs.values())
    split = [x for x in values if isinstance(x, SplitLogits)]
    first = split[0] if split else None
    changes = changes_first(func) or bool(kwargs.get("inplace"))
    if first is None or "out" in kwargs or (changes and args[0] is not first):
        return NotImplemented
    dim, vocabulary = first.vocabulary_dim, first.vocabulary

    def local(x: Any) -> Any:
        if isinstance(x, SplitLogits):
            return x.local
        if not isinstance(x, Tensor):
            return x
        x = plain(x)
        if x.ndim >= -dim and x.shape[dim] != 1:
            return vocabulary.split(x, dim)
        return vocabulary.copy(x)

    for x in values:
        if isinstance(x, SplitLogits):
            fits = x.vocabulary == vocabulary and x.vocabulary_dim == dim
        elif isinstance(x, Tensor):
            fits = x.ndim < -dim or x.shape[dim] in (1, vocabulary.whole)
        else:
            fits = not isinstance(x, tuple | list)
        if not fits:
            return NotImplemented
    result = func(*map(local, args), **{name: local(x) for name, x in kwargs.items()})
    return _again(result, split)


def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers in another form; another tensor only says which."""
    split = [x for x in args[:1] if isinstance(x, SplitLogits)]
    if not split:  # x.to(logits)
        other = (x.local if isinstance(x, SplitLogits) else x for x in args)
        return func(*other, **{k: _local(x) for k, x in kwargs.items()})
    result = func(*map(_local, args), **{k: _local(x) for k, x in kwargs.items()})
    if not isinstance(result, Tensor) or result.device.type != split[0].local.device.type:
        return NotImplemented  # a rank talks on the device of its mesh
    return _again(result, split)


def _local(x: Any) -> Any:
    return x.local if isinstance(x, SplitLogits) else x


def _again(result: Any, split: list[SplitLogits]) -> Any:
    for x in split:
        if result is x.local:
            return x
    return split[0].like(result) if isinstance(result, Tensor) else result


def changes_first(func: Any) -> bool:
    """Whether a function changes its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE.split()
    return name.endswith("_")


_LOCAL = [
    _NAMES,
    _OPERATORS,
    _IN_PLACE,
    "copy_ fill_ zero_",
    *(f"{name}_" for name in _NAMES.split()),
]
ANSWERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(functions(" ".join(_LOCAL)), pointwise),
    **dict.fromkeys(functions(_CASTS), cast),
}
"""Function → what it does with split logits."""
