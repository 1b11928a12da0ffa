"""Which layers of a model a small copy keeps: one or two of each kind."""

import json
from collections.abc import Mapping
from typing import Any

from plait.hf.small.fields import LAYERS

INDEX_LISTS = frozenset(
    {
        "cross_attention_layers",
        "full_attn_idxs",
        "fullatt_block_indexes",
        "global_attn_indexes",
        "hybrid_layer_ids",
        "mlp_only_layers",
        "moe_layers",
        "rope_scaling_layers",
    }
)
"""Fields that list the numbers of special layers."""

PER_LAYER = ("indexer_types", "activation_sparsity_pattern", "intermediate_size")
"""Fields without "layer" in their names that may be lists with one entry per layer."""

PERIODS = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": "",
    "encoder_sparse_step": "",
    "global_attn_every_n_layers": "",
    "interleave_moe_layer_step": "",
    "layer_group_size": "",
    "moe_layer_interval": "",
    "no_rope_layer_interval": "",
    "sliding_window_pattern": "",
    "_sliding_window_pattern": "",
}
"""Fields that make every n-th layer special, and the field with its offset."""

FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields that make the first few layers special."""


def number_of_layers(fields: Mapping[str, Any]) -> int | None:
    """The number of layers a config's fields tell, where they tell one."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"):
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
            return int(fields[name])
    counts = [v for k, v in fields.items() if k in LAYERS and isinstance(v, int)]
    return max(counts) if counts else None


def lists_per_layer(fields: Mapping[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """The fields that are lists with one entry per layer."""
    found = {}
    for name, value in fields.items():
        if not isinstance(value, list | tuple) or len(value) != num_layers:
            continue
        named = "layer" in name or name in PER_LAYER
        if named and name not in INDEX_LISTS:
            found[name] = list(value)
    return found


def kept_layers(fields: Mapping[str, Any], num_layers: int, per_kind: int) -> list[int]:
    """The layers to keep, in order: the first `per_kind` of each kind, at least two in all.

    Layers are of one kind when every list agrees on them and every period and list of numbers
    treats them alike.
    """
    lists = lists_per_layer(fields, num_layers)
    spec = fields.get("_heterogeneity_spec")
    overrides = getattr(spec, "per_layer_overrides", {})
    seen: dict[str, int] = {}
    kept = []
    for number in range(num_layers):
        kind = {name: values[number] for name, values in lists.items()}
        for name in INDEX_LISTS & fields.keys():
            kind[name] = number in (fields[name] or ())
        kind["own"] = sorted((overrides.get(number) or {}).items())
        for name in FIRST:
            first = fields.get(name)
            if isinstance(first, int) and first < num_layers:
                kind[name] = number < first
        key = json.dumps(kind, sort_keys=True, default=str)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= per_kind:
            kept.append(number)
    extra = iter(n for n in range(num_layers) if n not in kept)
    while len(kept) < min(2, num_layers):
        kept.append(next(extra))
    return sorted(kept)


def periods(fields: Mapping[str, Any]) -> dict[str, int]:
    """Shorter periods for layers that are special by their number, so that few show both kinds."""
    found: dict[str, int] = {}
    for name, offset in PERIODS.items():
        value = fields.get(name)
        if not isinstance(value, int) or value <= 1:
            continue
        found[name] = 2
        if offset and isinstance(fields.get(offset), int):
            found[offset] = min(fields[offset], 1)
    for name in FIRST:
        value = fields.get(name)
        if isinstance(value, int) and value > 1:
            found[name] = 1
    return found
