"""Attention blocks of a model that ships no plan: their layers, and styles for them."""

from collections.abc import Iterable, Mapping

from plait.plan import words as known
from plait.plan.derive.heads import Block, find_heads, layout_of
from plait.plan.derive.inside import inside
from plait.plan.derive.tree import Found, Layer, Tree, last, parent
from plait.plan.roles import HEAD_DIM, NUM_HEADS

_FUSED_STYLES = {
    "sections": "colwise_qkv",
    "per_head": "colwise_qkv_per_head",
    "per_group": "colwise_qkv_per_group",
}


_ROLES: tuple[tuple[str, frozenset[str]], ...] = (
    ("q_a", known.MLA_QUERY_DOWN),
    ("q", known.MLA_QUERY | known.QUERY),
    ("k", known.KEY),
    ("v", known.VALUE),
    ("kv_a", known.MLA_KV_DOWN),
    ("kv_b", known.MLA_KV),
    ("kv", known.FUSED_KV),
    ("qkv", known.FUSED),
    ("gate", known.GATE),
    ("extra", known.PER_HEAD_EXTRA),
    ("o", known.OUTPUT),
)


def attention(tree: Tree, found: Found) -> None:
    """Decide about every attention block of a model."""
    for name in tree.names.modules:
        block = _block(tree, name, found)
        if block is not None:
            _decide(tree, block, found)
    for name, kind in tree.names.modules.items():
        if known.PARTS.search(kind) and kind not in known.READS_WEIGHTS:
            _lone(tree, name, found)


def _lone(tree: Tree, name: str, found: Found) -> None:
    """Projections of an attention that has no others: cut, and gathered."""
    if known.MIXERS.search(tree.kind(name)):
        return
    names = known.QUERY | known.KEY | known.VALUE | known.FUSED_KV
    free = [layer for layer in tree.layers(name) if layer.name not in found.seen]
    ins = [x for x in free if x.role in names or x.role.startswith(("q_", "k_", "v_", "value_"))]
    outs = [x for x in free if x.role in known.OUTPUT and x not in ins]
    if ins or len(outs) == 1:
        found.reasons[name] = "its heads are not split: it has not all of the usual projections"
        found.gathered(ins, outs[0] if len(outs) == 1 else None)


def _block(tree: Tree, name: str, found: Found) -> Block | None:
    layers = tree.layers(name)
    kind = tree.kind(name)
    feeds = known.MLP_CLASS.search(kind) and "att" not in kind.lower()
    if not layers or feeds or "Indexer" in kind or known.MIXERS.search(kind):
        return None
    roles: dict[str, list[Layer]] = {}
    for layer in layers:
        role = next((role for role, names in _ROLES if layer.role in names), None)
        if role:
            roles.setdefault(role, []).append(layer)
    roles = _by_shape(tree, name, roles, layers)
    others = [x for x in layers if not any(x in known_as for known_as in roles.values())]
    if "q" in roles and "qkv" in roles and "k" not in roles:
        roles["kv"] = roles.pop("qkv")  # cross attention of GPT-2: a fused name for k and v
    separate = "q" in roles and ({"k", "v"} <= set(roles) or "kv" in roles or "kv_b" in roles)
    separate = separate or ("q" in roles and "o" in roles and _shares_keys(tree, name))
    about = f"{kind} {last(name)}".lower()
    fused = "qkv" in roles and len(layers) <= 4 and ("att" in about or _knows_heads(tree, name))
    if not separate and not fused:
        return None
    outputs = roles.pop("o", []) or _nested_output(tree, name, roles)
    if fused and not outputs and not _output_beside(tree, name, None):
        return None
    output = outputs[0] if len(outputs) == 1 else None
    if output is None and not outputs:
        output = _output_beside(tree, name, _value_width(roles))
    if any(layer.name in found.seen for layer in layers):
        return None
    mapped = {role: tuple(found_layers) for role, found_layers in roles.items()}
    others += outputs if output is None else []
    return Block(name, mapped, output, tuple(o for o in others if o is not output))


def _knows_heads(tree: Tree, name: str) -> bool:
    own = tree.names.facts.get(name, {})
    return any(key in own for key in (*NUM_HEADS, *HEAD_DIM))


def _shares_keys(tree: Tree, name: str) -> bool:
    """Whether a module without keys and values is of a class that has them elsewhere (Gemma 3n)."""
    kind = tree.kind(name)
    return any(
        {"k", "v"} <= {role for x in tree.layers(other) for role, n in _ROLES if x.role in n}
        for other, its in tree.names.modules.items()
        if its == kind
    )


def _by_shape(
    tree: Tree, name: str, roles: dict[str, list[Layer]], layers: tuple[Layer, ...]
) -> dict[str, list[Layer]]:
    """Roles from order and shapes where the names say nothing but the module knows its heads."""
    if "attention" not in tree.kind(name).lower() or len(layers) != 4 or set(roles) - {"o"}:
        return roles
    q, k, v, o = layers
    if q.into == k.into == v.into and o.into == q.width and o.width == q.into:
        return {"q": [q], "k": [k], "v": [v], "o": [o]}
    return roles


def _nested_output(tree: Tree, name: str, roles: dict[str, list[Layer]]) -> list[Layer]:
    """The output projection with its gate in a child of the attention; the gate joins the roles."""
    for child in tree.children.get(name, ()):
        layers = tree.layers(child)
        outputs = [layer for layer in layers if layer.role in known.OUTPUT]
        gates = [layer for layer in layers if layer.role in known.GATE]
        if len(outputs) == 1 and len(gates) == len(layers) - 1 and "out" in last(child):
            roles.setdefault("gate", []).extend(gates)
            return outputs
    return []


def _value_width(roles: Mapping[str, list[Layer]]) -> int | None:
    """Features that the output projection reads, where queries and values are as wide."""
    return roles["q"][0].width if "q" in roles else None


def _output_beside(tree: Tree, name: str, width: int | None) -> Layer | None:
    """The output projection in a sibling module, as in BERT: `attention.output.dense`."""
    above = parent(name)
    found = []
    for child in tree.children.get(above, ()):
        if child == name or last(child) not in ("output", "out", "proj", "self_output", "o_proj"):
            continue
        own = tree.layer(child)
        layers = (own,) if own else tree.layers(child)
        found += [x for x in layers if x.role in known.OUTPUT and width in (None, x.into)]
    return found[0] if len(found) == 1 and _attention_like(tree, above, name) else None


def _attention_like(tree: Tree, above: str, name: str) -> bool:
    """Whether the module above is an attention with one inner part, not a whole layer."""
    words = f"{tree.kind(above)} {last(above)} {last(name)}".lower()
    return "attention" in words or "attn" in words


def _decide(tree: Tree, block: Block, found: Found) -> None:
    kind = tree.kind(block.name)
    mine = [x for layers in block.by_role.values() for x in layers] + list(block.others)
    reads = kind in known.READS_WEIGHTS and ("Disentangled" not in kind or "qkv" in block.by_role)
    if reads:
        for layer in mine + ([block.output] if block.output else []):
            found.whole(layer, f"{kind}: {known.READS_WEIGHTS[kind]}")
        return
    heads, reason = find_heads(tree, block)
    if not reason:
        reason = _obstacle(_qualified(tree, kind), block)
    layout = ""
    if heads is not None and not reason and "qkv" in block.by_role:
        layout = layout_of(tree, block, heads)
        reason = "" if layout else "the layout of its fused projection is not known"
    extra: dict[str, str] = {}
    if heads is not None and not reason:
        width = block.output.into if block.output else 0
        claimed = {layer.name for layer in [*mine, *([block.output] if block.output else [])]}
        extra, reason = inside(tree, block.name, claimed, (heads.num, heads.num_kv), width)
    if heads is None or reason:
        _gather(block, found, f"its heads are not split: {reason}")
        return
    _split(block, layout, found)
    found.styles |= extra


def _qualified(tree: Tree, kind: str) -> str:
    """The class, with the model's family where the class is called `Attention` and no more."""
    is_fsmt = kind == "Attention" and tree.names.model.startswith("FSMT")
    return f"FSMT {kind}" if is_fsmt else kind


def _obstacle(kind: str, block: Block) -> str:
    if known.INPUT_WIDTH.search(kind):
        return f"{kind} reshapes its result to the width of its input"
    if kind in known.OTHER_LAYOUTS:
        return known.OTHER_LAYOUTS[kind]
    if known.WHOLE_HEADS.search(kind):
        return f"the code of {kind} needs all heads at once"
    if block.others:
        return f"it has further layers: {', '.join(layer.role for layer in block.others)}"
    if block.output is None:
        return "no output projection was found"
    doubled = [r for r, layers in block.by_role.items() if len(layers) > 1 and r != "extra"]
    return f"several layers look like its {doubled[0]}" if doubled else ""


def _split(block: Block, layout: str, found: Found) -> None:
    plain: Iterable[Layer] = (
        layer
        for role in ("q", "k", "v", "kv_b", "gate", "extra")
        for layer in block.by_role.get(role, ())
    )
    for layer in plain:
        found.style(layer, "colwise")
    for layer in block.by_role.get("qkv", ()):
        found.style(layer, _FUSED_STYLES[layout])
    for layer in block.by_role.get("kv", ()):
        found.style(layer, "colwise_kv")
    for layer in block.by_role.get("kv_a", ()):
        found.style(layer, "mla_kv_a_proj")
    for layer in block.by_role.get("q_a", ()):
        found.whole(layer, "the narrow half of a low-rank projection; its norm needs all of it")
    if block.output:
        found.style(block.output, "rowwise")


def _gather(block: Block, found: Found, reason: str) -> None:
    found.reasons[block.name] = reason
    found.gathered([*block.projections, *block.others], block.output)
    for role in ("q_a", "kv_a", "kv_b"):
        for layer in block.by_role.get(role, ()):
            found.whole(layer, reason)
