"""The sizes of a small copy, and how the fields of a config take them."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from plait.hf.small import fields as table
from plait.hf.small import layers as layers
from plait.hf.small.special import SECTIONED, parts


@dataclass
class Sizes:
    """What a small copy is made of.

    Args:
        heads: Query heads of all attention.
        kv_heads: Key/value heads; None follows the ratio of each part.
        head_dim: Width of a head.
        intermediate: Width of MLPs.
        per_kind: Layers of each kind.
        vocab: Tokens of the vocabulary.
        tokens: Special tokens of the original → of the copy.
    """

    heads: int
    kv_heads: int | None
    head_dim: int
    intermediate: int
    per_kind: int
    vocab: int = table.VOCABULARY
    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        """Width of the stream between layers."""
        return self.heads * self.head_dim


def choose(
    config: Any, heads: int | None, kv_heads: int | None, intermediate: int | None, per_kind: int
) -> Sizes:
    """The sizes for a config whose fields still have their original values."""
    asked_kv = kv_heads
    if heads is None or kv_heads is None:
        ratio = ratio_of(config)
        if heads is None:
            kv = kv_heads if kv_heads is not None else (2 if 1 < ratio[0] < ratio[1] else None)
            heads = kv * min(8, ratio[1] // ratio[0]) if kv else 4
            heads = max(heads, 4) if kv is None or heads % 2 == 0 else heads
        asked_kv = kv_heads
    wide = any(_turns_partly(vars(p)) or p.model_type in SECTIONED for p in parts(config))
    width = 16 if wide else 8
    return Sizes(
        heads=heads,
        kv_heads=asked_kv,
        head_dim=width,
        intermediate=12 * heads if intermediate is None else intermediate,
        per_kind=per_kind,
        tokens=dict(_tokens(config)),
    )


def shrink_tree(config: Any, sizes: Sizes) -> None:
    """Shrink a config and all configs inside it, in place."""
    for part in parts(config):
        fields = vars(part)
        _shrink(fields, sizes)


def ratio_of(config: Any) -> tuple[int, int]:
    """(key/value heads, query heads) of the part that has fewer of the former, else (1, 1)."""
    for part in parts(config):
        fields = vars(part)
        if "kv_lora_rank" in fields:
            continue
        for name, of in table.KEY_VALUE_HEADS.items():
            kv = fields.get(name)
            q = next((fields[n] for n in of if isinstance(fields.get(n), int)), None)
            if isinstance(kv, int) and isinstance(q, int) and 0 < kv < q:
                return kv, q
    return 1, 1


def _turns_partly(fields: MutableMapping[str, Any]) -> bool:
    text = repr(fields.get("rope_parameters"))
    return "mrope_section" in text or (
        isinstance(fields.get("partial_rotary_factor"), float) or "partial_rotary_factor" in text
    )


def _tokens(config: Any) -> Iterator[tuple[int, int]]:
    """Special tokens beyond the first few, numbered from the end of the small vocabulary."""
    found = {v for part in parts(config) for v in _token_values(vars(part)) if v >= 40}
    for number, value in enumerate(sorted(found)):
        yield value, table.VOCABULARY - len(found) + number


def _token_values(fields: MutableMapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if is_token(name):
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
                    yield one


def is_token(name: str) -> bool:
    """Whether a field with this name holds a token of the vocabulary, or several."""
    endings = ("_token_id", "_token_ids", "_token_index", "_suppress_tokens", "suppress_tokens")
    others = ("im_start_id", "im_end_id", "im_newline_id", "image_patch_id")
    return name.endswith(endings) or name in others


def _shrink(fields: MutableMapping[str, Any], sizes: Sizes) -> None:
    old = dict(fields)
    num_layers = layers.number_of_layers(old)
    if num_layers:
        _shrink_layers(fields, old, num_layers, sizes)
    fields.update(layers.periods(old))
    for name, value in old.items():
        if _is_integer(value) or (isinstance(value, list) and name in table.QUERY_HEADS):
            _shrink_number(fields, old, name, sizes)
        elif isinstance(value, list | tuple) and name in table.MIDDLE and value:
            widths = (sizes.intermediate, sizes.intermediate // 2)
            fields[name] = type(value)(widths[one != max(value)] for one in fields[name])
        elif isinstance(value, float) and "drop" in name:
            fields[name] = 0.0
        if is_token(name):
            fields[name] = _mapped(value, sizes.tokens)
    spec = fields.get("_heterogeneity_spec")
    for overrides in getattr(spec, "per_layer_overrides", {}).values():
        before = {**old, **overrides}
        for name in overrides:
            if _is_integer(overrides[name]):
                changed = dict(before)
                _shrink_number(changed, before, name, sizes)
                wider = name in table.HEAD_WIDTHS and overrides[name] > old.get(name, 0)
                overrides[name] = changed[name] * (2 if wider else 1)
    _shrink_rope(fields, old, sizes)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mapped(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, tokens) for one in value)
    return tokens.get(value, value) if _is_integer(value) else value


def _shrink_number(
    fields: MutableMapping[str, Any], old: MutableMapping[str, Any], name: str, sizes: Sizes
) -> None:
    value = old[name]
    if "drop" in name:
        fields[name] = 0
    elif name in table.QUERY_HEADS:
        many = isinstance(fields[name], list)
        fields[name] = [sizes.heads] * len(fields[name]) if many else sizes.heads
    elif name in table.KEY_VALUE_HEADS:
        fields[name] = _kv_heads(old, name, sizes)
    elif name in ("qk_rope_head_dim",):
        fields[name] = min(value, sizes.head_dim // 2)
    elif name == "qk_head_dim":
        fields[name] = sizes.head_dim + min(old.get("qk_rope_head_dim", 0), sizes.head_dim // 2)
    elif name == "head_dim" and old.get("qk_rope_head_dim"):
        rope = min(old["qk_rope_head_dim"], sizes.head_dim // 2)
        same = value == old["qk_rope_head_dim"]
        both = value == old.get("qk_head_dim")
        fields[name] = rope if same else rope + sizes.head_dim if both else sizes.head_dim
    elif name == "rotary_dim":
        fields[name] = sizes.head_dim // 2
    elif name in table.HEAD_WIDTHS:
        fields[name] = sizes.head_dim if value > 0 else value
    elif name in table.HIDDEN:
        fields[name] = sizes.hidden if value > 0 else value
    elif name in table.MIDDLE:
        fields[name] = sizes.intermediate if value > 0 else value
    elif name in table.TIED_TO_MAIN_VOCABULARY:
        fields[name] = sizes.vocab
    elif name in table.AT_MOST:
        fields[name] = min(value, table.AT_MOST[name])
    elif name == "image_size":
        fields[name] = 16
    elif name == "patch_size":
        fields[name] = 4


def _kv_heads(old: MutableMapping[str, Any], name: str, sizes: Sizes) -> int:
    value = old[name]
    of = table.KEY_VALUE_HEADS[name]
    q = next((old[n] for n in of if _is_integer(old.get(n))), value)
    if old.get("kv_lora_rank"):  # latent attention has one key and value per query head
        return sizes.heads
    if sizes.kv_heads is not None:
        return sizes.kv_heads
    return nearest_kv(sizes.heads, q, value)


def nearest_kv(heads: int, old_heads: int, old_kv: int) -> int:
    """Key/value heads for so many query heads, in a ratio like the original's."""
    if old_kv >= old_heads:
        return heads
    if old_kv == 1:
        return 1
    fitting = [n for n in range(2, heads + 1) if heads % n == 0]
    return min(fitting, key=lambda n: abs(heads / n - old_heads / old_kv))


def _shrink_layers(
    fields: MutableMapping[str, Any], old: MutableMapping[str, Any], num_layers: int, sizes: Sizes
) -> None:
    kept = layers.kept_layers(old, num_layers, sizes.per_kind)
    for name, values in layers.lists_per_layer(old, num_layers).items():
        fields[name] = type(old[name])(values[n] for n in kept)
    for name in layers.INDEX_LISTS & old.keys():
        if isinstance(old[name], list | tuple):
            fields[name] = type(old[name])(i for i, n in enumerate(kept) if n in old[name])
    spec = old.get("_heterogeneity_spec")
    if spec is not None:
        overrides = spec.per_layer_overrides
        moved = {i: overrides[n] for i, n in enumerate(kept) if n in overrides}
        overrides.clear()
        overrides.update(moved)
    for name in table.LAYERS & old.keys():
        if _is_integer(old[name]) and old[name] > 0:
            fields[name] = len(kept) if old[name] == num_layers else min(old[name], 2)


def _shrink_rope(
    fields: MutableMapping[str, Any], old: MutableMapping[str, Any], sizes: Sizes
) -> None:
    rope = fields.get("rope_parameters")
    factor = fields.get("partial_rotary_factor")
    if isinstance(factor, float | int) and not isinstance(factor, bool):
        fields["partial_rotary_factor"] = _even_factor(float(factor), sizes.head_dim)
    if not isinstance(rope, dict):
        return
    width = fields.get("head_dim") if _is_integer(fields.get("head_dim")) else sizes.head_dim
    for one in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        own = one.get("partial_rotary_factor", factor)
        if _turns_latent(old, own) and "partial_rotary_factor" in one:
            one["partial_rotary_factor"] = fields["qk_rope_head_dim"] / fields["head_dim"]
            continue
        own = 1.0 if not isinstance(own, float | int) else float(own)
        if "partial_rotary_factor" in one and one["partial_rotary_factor"] is not None:
            one["partial_rotary_factor"] = own = _even_factor(own, width or sizes.head_dim)
        half = int((width or sizes.head_dim) * own) // 2
        if one.get("mrope_section"):
            one["mrope_section"] = _scaled(one["mrope_section"], half)
        for name in ("short_factor", "long_factor"):
            if one.get(name):
                one[name] = list(one[name][:half])
        if one.get("original_max_position_embeddings"):
            one["original_max_position_embeddings"] = 32


def _turns_latent(old: MutableMapping[str, Any], factor: Any) -> bool:
    """Whether the turned part of a head is the one that latent attention keeps apart."""
    rope, head = old.get("qk_rope_head_dim"), old.get("head_dim")
    return bool(rope and head and isinstance(factor, float) and int(head * factor) == rope)


def _even_factor(factor: float, width: int) -> float:
    """The factor nearest to the given one that turns an even number of a head's features."""
    turned = max(2, 2 * round(factor * width / 2))
    return min(turned, width) / width


def _scaled(sections: list[int], total: int) -> list[int]:
    whole = sum(sections)
    small = [max(1 if total >= len(sections) else 0, total * n // whole) for n in sections]
    small[-1] += total - sum(small)
    while small[-1] < 0:
        small[small.index(max(small))] -= 1
        small[-1] += 1
    return small
