"""Attention blocks of a model that ships no plan: which layers they have, and the styles for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.plan import derive_names as known
from plait.plan.derive_inside import inside
from plait.plan.derive_tree import Found, Layer, Tree, last, parent
from plait.plan.roles import HEAD_DIM, NUM_HEADS

_FUSED_STYLES = {
    "sections": "colwise_qkv",
    "per_head": "colwise_qkv_per_head",
    "per_group": "colwise_qkv_per_group",
}


@dataclass(frozen=True)
class Block:
    """One attention: the module that holds its projections, and the layers by role.

    Attributes:
        name: The module.
        by_role: Role (`q k v qkv kv q_a kv_a kv_b gate extra`) → layers.
        output: The projection that ends it; it may live in a sibling.
        others: Linear layers of the module with no role that is known.
    """

    name: str
    by_role: Mapping[str, tuple[Layer, ...]]
    output: Layer | None
    others: tuple[Layer, ...]

    def one(self, role: str) -> Layer | None:
        """The only layer of a role."""
        found = self.by_role.get(role, ())
        return found[0] if len(found) == 1 else None

    @property
    def projections(self) -> list[Layer]:
        """The layers that read the whole hidden states."""
        roles = ("q", "k", "v", "qkv", "kv", "gate", "extra")
        return [layer for role in roles for layer in self.by_role.get(role, ())]


@dataclass(frozen=True)
class Heads:
    """The heads of an attention: their numbers, and the width of one."""

    num: int
    num_kv: int
    dim: int
    v_dim: int


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
        if "Attention" in kind and kind not in known.READS_WEIGHTS and "Map" not in kind:
            _lone(tree, name, found)


def _lone(tree: Tree, name: str, found: Found) -> None:
    """Projections of an attention that has no others: cut, and gathered."""
    names = known.QUERY | known.KEY | known.VALUE | known.FUSED_KV
    free = [x for x in tree.layers(name) if x.name not in found.seen and x.role in names]
    if free and not known.MIXERS.search(tree.kind(name)):
        found.reasons[name] = "its heads are not split: it has not all of the usual projections"
        found.gathered(free, None)


def _block(tree: Tree, name: str, found: Found) -> Block | None:
    layers = tree.layers(name)
    if not layers or known.MIXERS.search(tree.kind(name)):
        return None
    roles: dict[str, list[Layer]] = {}
    others = []
    for layer in layers:
        role = next((role for role, names in _ROLES if layer.role in names), None)
        roles.setdefault(role, []).append(layer) if role else others.append(layer)
    roles = _by_shape(tree, name, roles, layers)
    if "q" in roles and "qkv" in roles and "k" not in roles:
        roles["kv"] = roles.pop("qkv")  # cross attention of GPT-2: a fused name for k and v
    separate = "q" in roles and ({"k", "v"} <= set(roles) or "kv" in roles or "kv_b" in roles)
    fused = "qkv" in roles and len(layers) <= 4
    if not separate and not fused:
        return None
    outputs = roles.pop("o", [])
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
    if kind in known.READS_WEIGHTS:
        for layer in mine + ([block.output] if block.output else []):
            found.whole(layer, f"{kind}: {known.READS_WEIGHTS[kind]}")
        return
    heads, reason = _heads(tree, block)
    if not reason:
        reason = _obstacle(kind, block)
    layout = ""
    if heads is not None and not reason and "qkv" in block.by_role:
        layout = _layout(tree, block, heads)
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


def _obstacle(kind: str, block: Block) -> str:
    if kind in known.OTHER_LAYOUTS:
        return known.OTHER_LAYOUTS[kind]
    if known.WHOLE_HEADS.search(kind):
        return f"the code of {kind} needs all heads at once"
    if block.others:
        return f"it has further layers: {', '.join(layer.role for layer in block.others)}"
    if block.output is None:
        return "no output projection was found"
    doubled = [role for role, layers in block.by_role.items() if len(layers) > 1]
    return f"several layers look like its {doubled[0]}" if doubled else ""


def _heads(tree: Tree, block: Block) -> tuple[Heads | None, str]:
    """The heads, or why they cannot be found."""
    if block.output is None:
        return None, "no output projection was found"
    width = block.output.into
    num = tree.fact(block.name, NUM_HEADS) or _any_count(tree, block.name)
    dim = tree.fact(block.name, HEAD_DIM)
    own = tree.names.facts.get(block.name, {})
    own_dim = next((own[key] for key in HEAD_DIM if own.get(key, 0) > 0), None)
    if num and width % num and own_dim:
        num = width // own_dim
    num = num or (width // dim if dim else None)
    if not num or width % num:
        return None, f"the number of its heads is not known (output projection reads {width})"
    v_dim = width // num
    qk_dim = own_dim or tree.fact(block.name, ("qk_head_dim",)) or v_dim
    return _checked(block, num, qk_dim, v_dim)


def _any_count(tree: Tree, name: str) -> int | None:
    more = ("num_attn_heads", "attention_heads", "h", "nhead", "n_local_heads", "num_head", "H")
    return tree.fact(name, more)


def _checked(block: Block, num: int, qk_dim: int, v_dim: int) -> tuple[Heads | None, str]:
    """Whether every projection consists of whole heads."""
    q, k, v, kv, qkv = (block.one(role) for role in ("q", "k", "v", "kv", "qkv"))
    if "kv_b" in block.by_role:
        ok = q is not None and q.width % num == 0
        return (Heads(num, num, qk_dim, v_dim), "") if ok else (None, "its queries do not divide")
    num_kv = num
    if qkv is not None:
        rest = qkv.width - num * qk_dim
        if rest <= 0 or rest % (qk_dim + v_dim):
            return None, f"its fused width {qkv.width} is not made of {num} heads of {qk_dim}"
        num_kv = rest // (qk_dim + v_dim)
    elif q is not None and q.width % num:
        return None, f"its query width {q.width} is not made of {num} heads"
    elif kv is not None:
        num_kv, rest = divmod(kv.width, qk_dim + v_dim)
        if rest:
            return None, f"its key/value width {kv.width} is not made of heads of {qk_dim}"
    elif k is not None and v is not None and q is not None:
        qk_dim = qk_dim if k.width % qk_dim == 0 else q.width // num
        num_kv = v.width // v_dim
        if k.width != num_kv * qk_dim or v.width != num_kv * v_dim:
            return None, f"key width {k.width} and value width {v.width} are not {num_kv} heads"
    if not num_kv or num % num_kv:
        return None, f"{num} query heads do not share {num_kv} key/value heads evenly"
    return Heads(num, num_kv, qk_dim, v_dim), ""


def _layout(tree: Tree, block: Block, heads: Heads) -> str:
    """Which of the three orders a fused projection has."""
    facts, kind = tree.facts(block.name), tree.kind(block.name)
    layer = block.one("qkv")
    if layer is None:
        return ""
    if "Falcon" in kind:
        if facts.get("new_decoder_architecture"):
            return "per_group"
        return "sections" if facts.get("multi_query") else "per_head"
    if "GPTBigCode" in kind:
        return "sections" if facts.get("multi_query") else "per_head"
    if kind in known.PER_HEAD_CLASSES:
        return "per_head"
    if layer.role in known.PER_GROUP_NAMES:
        return "per_group"
    if layer.role == "query_key_value" and heads.num == heads.num_kv:
        return "per_head"
    return "sections"


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
    found.gathered(block.projections, block.output)
    for role in ("q_a", "kv_a", "kv_b"):
        for layer in block.by_role.get(role, ()):
            found.whole(layer, reason)
    for layer in block.others:
        found.whole(layer, reason)
