"""transformers' conversion tables, read as data: from checkpoint names to recipes, and back.

A table is a list of renamings (regular expressions over names) and converters (patterns and a chain
of operations over tensors). The operations run on recipes instead of tensors
(`plait.hf.conversion_steps`), so that each rank reads only the slices that end up in its shards.

Written against transformers 5.23 (`core_model_loading`, `conversion_mapping`); its loader is not
used.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.hf.conversion_steps import Group
from plait.weights.checkpoint import Checkpoint
from plait.weights.recipes import Recipe
from plait.weights.store import TensorStore


@dataclass(frozen=True)
class Conversion:
    """How a model is made from a checkpoint.

    Args:
        recipes: The recipe of every parameter and persistent buffer that the checkpoint makes, by
            its name in the model; tied names have the recipe of the one that is stored.
        missing: Names of the model that the checkpoint does not make (those that the model's class
            lists as dispensable left out).
        unexpected: Tensors of the checkpoint, by their names there, that the model does not use
            (those that the class lists as superfluous left out).
        untied: Names that the config ties but that the checkpoint stores with another value than
            the name they are tied to; the caller must give them a parameter of their own.
        transforms: The entries of the tables that matched: what saving must undo.
    """

    recipes: dict[str, Recipe]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    transforms: tuple[Any, ...] = field(default=(), repr=False)


def convert(
    model: nn.Module,
    checkpoint: Checkpoint,
    key_mapping: Mapping[str, str] | None = None,
    tables: Sequence[Any] | None = None,
) -> Conversion:
    """Finds how a transformers model is made from the tensors of a checkpoint.

    Args:
        model: The model; its parameters may be on meta and may be DTensors.
        checkpoint: The open checkpoint; nothing but names and shapes is looked at, except where
            tied names are both stored and must be compared.
        key_mapping: Renamings of the caller, regular expression → replacement, applied first.
        tables: Renamings and converters to use instead of the model's own.

    Raises:
        WeightsError: An operation of the tables does not fit the tensors it is applied to.
    """
    if tables is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        tables = get_model_conversion_mapping(model, dict(key_mapping or {}) or None, None)
    state = _state(model)
    groups, unmatched = _grouped(model, checkpoint.keys(), tables, state)
    recipes: dict[str, Recipe] = {}
    for target, group in groups.items():
        for name, recipe in group.run(model, checkpoint, target).items():
            if name in state:
                recipes[name] = recipe
    used = tuple(table for table in tables if table.was_used())
    return completed(model, checkpoint, recipes, unmatched, used)


def completed(
    model: nn.Module,
    checkpoint: Checkpoint,
    recipes: dict[str, Recipe],
    unmatched: Iterable[tuple[str, str]],
    transforms: tuple[Any, ...] = (),
) -> Conversion:
    """Gives tied names their recipes and works out what is missing and unexpected.

    Args:
        model: The model.
        checkpoint: The open checkpoint.
        recipes: The recipes found; those of tied names are added.
        unmatched: Tensors of the checkpoint that go nowhere, each with its name after renaming.
        transforms: The entries of the tables that matched.
    """
    state = _state(model)
    missing = set(state) - set(recipes)
    untied = _tie(model, checkpoint, recipes, missing)
    skip_missing, skip_unexpected = _ignored(model)
    return Conversion(
        recipes,
        tuple(name for name in state if name in missing and not _matches(skip_missing, name)),
        tuple(key for key, renamed in unmatched if not _matches(skip_unexpected, renamed)),
        untied,
        transforms,
    )


def saved_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the parameters and buffers that a checkpoint of the model holds, tied ones once.

    Of tied names the one is kept that the model's class ties the others to. Names that the config
    ties but that hold tensors of their own are all kept, as transformers does.

    Args:
        model: The model.
    """
    skipped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = []
    for name in _state(model):
        source = tied.get(name)
        x, y = tensors.get(name), tensors.get(source or "")
        follows = x is not None and x is y
        if name not in skipped and not follows:
            names.append(name)
    return tuple(names)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}


def revert(
    model: nn.Module,
    names: Iterable[str],
    store: TensorStore,
    transforms: Sequence[Any] | None = None,
) -> dict[str, Recipe]:
    """Finds how the tensors of a checkpoint file are made from the parameters of a model.

    The names and layouts are those of the file the model came from (or, for a model that came from
    none, those of its family's published checkpoints).

    Args:
        model: The model.
        names: The parameters and buffers to be saved, each tensor once.
        store: The shapes and dtypes of those.
        transforms: What loading used (`Conversion.transforms`); by default what transformers
            remembers of its own loading, else the tables of the model.

    Returns:
        For each tensor of the file its recipe over the names of the model, one group of converted
        tensors after another.
    """
    from transformers.core_model_loading import apply_renamings

    if transforms is None:
        transforms = _default_transforms(model)
    backward = [entry.reverse_transform() for entry in reversed(list(transforms))]
    renamings, converters = _split_tables(backward)
    groups = _reverse_groups(list(names), renamings, converters)
    recipes: dict[str, Recipe] = {}
    for target, group in groups.items():
        made = group.run(model, store, target)
        if group.converter is not None:
            made = {apply_renamings(name, renamings): recipe for name, recipe in made.items()}
        recipes.update(made)
    return recipes


def _split_tables(tables: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters of a table."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    entries = list(tables)
    return (
        [entry for entry in entries if isinstance(entry, WeightRenaming)],
        [entry for entry in entries if isinstance(entry, WeightConverter)],
    )


def _grouped(
    model: Any, keys: Iterable[str], tables: Sequence[Any], state: Mapping[str, Tensor]
) -> tuple[dict[str, Group], list[tuple[str, str]]]:
    """The checkpoint's tensors by the target they go into, and those that go nowhere."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _split_tables(tables)
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    groups: dict[str, Group] = {}
    unmatched = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, dict(state))
        if name not in state and key in state:
            # A name that the model has already: an old renaming matched it by accident.
            name, pattern = rename_source_key(key, [], [], prefix, dict(state))
        if name not in state:
            unmatched.append((key, name))
            continue
        converter = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(name, Group(converter))
        if group.converter is not None:
            group.keys.setdefault(pattern or key, []).append(key)
        elif not group.keys:  # of several names for one target the first counts
            group.keys[key] = [key]
    return groups, unmatched


def _reverse_groups(
    names: list[str], renamings: list[Any], converters: list[Any]
) -> dict[str, Group]:
    from transformers.core_model_loading import (
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            groups[apply_renamings(name, renamings)] = Group(None, {name: [name]})
        else:
            group = groups.setdefault(target, Group(by_pattern[pattern]))
            group.keys.setdefault(pattern, []).append(name)
    return groups


def _default_transforms(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    # A prefix that is dropped on loading is not added on saving a model that came from no file.
    tables = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in tables if not isinstance(entry, PrefixChange)]


def _tie(
    model: Any, checkpoint: Checkpoint, recipes: dict[str, Recipe], missing: set[str]
) -> tuple[str, ...]:
    """Gives tied names the recipe of the stored one; returns those that must not be tied."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    clusters: dict[str, list[str]] = {}
    for target, source in tied.items():
        clusters.setdefault(source, [source]).append(target)
    untied = []
    for source, names in clusters.items():
        stored = [name for name in names if name in recipes]
        if not stored:
            continue
        for name in names:
            if name not in recipes:
                recipes[name] = recipes[stored[0]]
                missing.discard(name)
            elif name != source and source in stored:
                if _equal(checkpoint, recipes[name], recipes[source]):
                    recipes[name] = recipes[source]
                else:
                    untied.append(name)
    return tuple(untied)


def _equal(checkpoint: Checkpoint, a: Recipe, b: Recipe, rows: int = 1 << 12) -> bool:
    """Whether two recipes make the same tensor, compared a few rows at a time."""
    shape = a.shape(checkpoint)
    if shape != b.shape(checkpoint):
        return False
    before = checkpoint.bytes_read
    starts = range(0, shape[0], rows) if shape else (None,)
    same = True
    for start in starts:
        at = (None, ()) if start is None else (0, ((start, min(start + rows, shape[0])),))
        same = same and torch.equal(a.read(checkpoint, *at), b.read(checkpoint, *at))
    checkpoint.bytes_read = before  # a check, not a part of loading
    return same


def _ignored(model: Any) -> tuple[list[str], list[str]]:
    """The patterns of names that may be missing, and of those that may be superfluous."""
    superfluous = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    # Tables that older checkpoints stored in every layer and that models compute now.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        superfluous.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        superfluous.append(r"(^|\.)position_ids$")
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()), superfluous


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
