"""The heads of an attention block, and the order in which a fused projection holds them."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.plan import words as known
from plait.plan.derive.tree import Layer, Tree
from plait.plan.roles import HEAD_DIM, NUM_HEADS


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


def find_heads(tree: Tree, block: Block) -> tuple[Heads | None, str]:
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
    if num == 1:
        return None, "it has one head"
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


def layout_of(tree: Tree, block: Block, heads: Heads) -> str:
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
