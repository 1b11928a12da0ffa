"""Methods of a model beside `forward` that read its own parameters: `get_image_features` and kin.

`generate` and users call them directly, so the model's forward has not made its parameters plain
tensors by then.
"""

import functools
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

from plait.styles.params import LocalParams

_FEATURES = re.compile(r"get_\w+_features")


def _with_local_params(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, run with the model's own parameters as plain tensors."""

    @functools.wraps(method)  # generate() looks at its signature
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        with LocalParams(model):
            return method(model, *args, **kwargs)

    return run


def bind_features(model: Any) -> None:
    """Let the `get_…_features` methods of a split model see its own parameters as plain tensors.

    Args:
        model: A model of transformers, or a part of one, in place.
    """
    if not any(param is not None for param in model._parameters.values()):
        return
    for name in dir(type(model)):
        if _FEATURES.fullmatch(name):
            method = _with_local_params(getattr(type(model), name))
            model.__dict__[name] = MethodType(method, model)
