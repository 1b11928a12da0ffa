"""The names, classes and shapes of a module, as the plan room wants them."""

from torch import nn

from plait.plan import ModelNames


def names_of(module: nn.Module) -> ModelNames:
    """Names, classes and shapes of a module, as the plan room wants them."""
    params: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for owner, part in module.named_modules():
        for local_name, param in part.named_parameters(recurse=False):
            name = f"{owner}.{local_name}" if owner else local_name
            params[name], owners[name] = tuple(param.shape), owner
            if id(param) in first:
                tied[name] = first[id(param)]
            else:
                first[id(param)] = name
    prefix = getattr(module, "base_model_prefix", "") or ""
    has_base = bool(prefix) and isinstance(getattr(module, prefix, None), nn.Module)
    return ModelNames(
        modules={name: _kind(part) for name, part in module.named_modules()},
        params=params,
        owners=owners,
        tied=tied,
        base_prefix=prefix if has_base else "",
        model=type(module).__name__,
    )


def _kind(part: nn.Module) -> str:
    """The class of a module by name; subclasses of the two that styles know count as these."""
    for known in (nn.Embedding, nn.Linear):
        if isinstance(part, known):
            return known.__name__
    return type(part).__name__
