"""Are the inputs and arguments of `generate` the same on all ranks of the group?

Ranks that disagree about a shape hang or crash deep inside a collective; ranks that disagree
about values produce plausible nonsense. Both are told apart here, before any work.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import LayoutError
from plait.hf.generation.messages import digest, global_ranks

# What a rank is told about one argument: a text for people, and a checksum where that hides values.
Description: TypeAlias = dict[str, tuple[str, str]]

_ABSENT = ("absent", "")
_UNCOMPARED = frozenset({"streamer", "synced_gpus"})


def describe(model: Any, arguments: Mapping[str, Any]) -> Description:
    """Describes everything of a `generate` call on which the ranks must agree.

    Args:
        model: The model, whose own `generation_config` gives the defaults.
        arguments: The call's arguments by name.

    Returns:
        For every argument that was given, and every generation setting, its printable form and a
        checksum of the values that the printable form leaves out.
    """
    described: Description = {}
    configs = {"model.generation_config": getattr(model, "generation_config", None)}
    for name, value in {**configs, **arguments}.items():
        if value is not None and name not in _UNCOMPARED:
            _describe(name, value, described)
    return described


def _describe(name: str, value: Any, described: Description) -> None:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        described[name] = (f"{dtype} {tuple(value.shape)}", digest(value))
    elif hasattr(value, "get_seq_length"):  # a KV cache; its content follows from the calls before
        described[name] = (f"{type(value).__name__} of length {value.get_seq_length()}", "")
    elif hasattr(value, "to_dict") and not isinstance(value, torch.nn.Module):
        for key, item in value.to_dict().items():
            if item is not None:
                described[f"{name}.{key}"] = _plain(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if item is not None:
                _describe(f"{name}.{key}", item, described)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if any(isinstance(item, torch.Tensor) or callable(item) for item in value):
            described[name] = (f"{type(value).__name__} of {len(value)}", "")
            for index, item in enumerate(value):
                _describe(f"{name}[{index}]", item, described)
        else:
            described[name] = _plain(value)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        described[name] = _plain(value)
    else:
        described[name] = (f"a {type(value).__qualname__}", "")


def _plain(value: Any) -> tuple[str, str]:
    text = repr(value)
    if len(text) <= 60:
        return text, ""
    return f"{text[:57]}...", hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def compare(descriptions: Sequence[Description], mesh: DeviceMesh) -> None:
    """Refuses a call whose ranks disagree.

    Args:
        descriptions: `describe` of every rank, in group order.
        mesh: The 1-D mesh of the group.

    Raises:
        LayoutError: Names every argument that differs, with each rank's shape or value. All ranks
            compare the same descriptions, so it is raised on all of them or on none.
    """
    names = sorted({name for description in descriptions for name in description})
    ranks = global_ranks(mesh)
    problems = [
        problem
        for name in names
        if (problem := _difference(name, [d.get(name, _ABSENT) for d in descriptions], ranks))
    ]
    if problems:
        raise LayoutError(
            f"generate() on {len(ranks)} ranks of one group needs the same input on all of them.",
            problems,
            (
                "give every rank of the group the same batch (broadcast it, or read it alike)",
                "use a data-parallel axis if the ranks are meant to work on different batches",
            ),
        )


def _difference(name: str, values: Sequence[tuple[str, str]], ranks: Sequence[int]) -> str | None:
    if len(set(values)) == 1:
        return None
    if len({text for text, _ in values}) > 1:
        return f"{name} differs: {_by_rank([text for text, _ in values], ranks)}"
    same, sums = values[0][0], [checksum for _, checksum in values]
    return f"{name} is {same} everywhere, but its values differ: {_by_rank(sums, ranks, 'sum ')}"


def _by_rank(values: Sequence[str], ranks: Sequence[int], prefix: str = "") -> str:
    groups: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, members in groups.items():
        who = ", ".join(map(str, members))
        parts.append(f"rank{'s' if len(members) > 1 else ''} {who}: {prefix}{value}")
    return "; ".join(parts)


def by_name(
    generate: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of `generate(model, *args, **kwargs)`, each under its name.

    Raises:
        TypeError: The call does not fit the signature, as Python itself would say.
    """
    import inspect

    signature = inspect.signature(generate)
    bound = signature.bind(model, *args, **kwargs)
    named: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        if index == 0:
            continue  # the model itself
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named
