"""Methods of a model beside `forward` that read its own parameters: `get_image_features` and kin.

`generate` and users call them directly, so the model's forward has not made its parameters plain
tensors by then.
"""

import re
from types import MethodType
from typing import Any

from plait.styles.params import LocalParams

_FEATURES = re.compile(r"get_\w+_features")


class _WithLocalParams:
    """A method of a model, run with the model's own parameters as plain tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        with LocalParams(model):
            return getattr(type(model), self.name)(model, *args, **kwargs)


def bind_features(model: Any) -> None:
    """Let the `get_…_features` methods of a split model see its own parameters as plain tensors.

    Args:
        model: A model of transformers, or a part of one, in place.
    """
    if not any(param is not None for param in model._parameters.values()):
        return
    for name in dir(type(model)):
        if _FEATURES.fullmatch(name):
            model.__dict__[name] = MethodType(_WithLocalParams(name), model)
