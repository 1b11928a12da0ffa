"""What an attention holds besides its projections: norms, sinks, scalars, tables of biases."""

import re
from collections.abc import Collection

from plait.plan import words as known
from plait.plan.derive.tree import LINEAR, Tree, last

_ON_HEADS = re.compile(r"(^|_)(q|k|v|query|key|value|qk)(_|$)|ln_[qkv]$|norm_[qkv]$")
_ON_OUTPUT = re.compile(r"sub_?norm|inner_attn_ln|sub_?ln|subln")
_PER_HEAD = re.compile(r"sink|alpha|slope|bias|^A$|temp|temperature|decay|head")


def inside(
    tree: Tree, name: str, claimed: Collection[str], counts: tuple[int, int], width: int
) -> tuple[dict[str, str], str]:
    """Styles for what else an attention holds, if its heads are split.

    Args:
        tree: The model.
        name: The attention.
        claimed: Its projections.
        counts: Numbers of query heads and of key/value heads.
        width: Features that its output projection reads.

    Returns:
        `(styles, "")`, or `({}, reason)` where something stands in the way of splitting the heads.
    """
    styles, reason = _own(tree, name, counts, width)
    if reason:
        return {}, reason
    for child in tree.children.get(name, ()):
        wrapped = any(x.startswith(f"{child}.") for x in claimed)
        if child in claimed or wrapped or not tree.has_params(child):
            continue
        found, reason = _child(tree, child, claimed, counts, width)
        if reason:
            return {}, reason
        styles |= found
    return styles, ""


def _own(tree: Tree, name: str, counts: tuple[int, int], width: int) -> tuple[dict[str, str], str]:
    """Bare parameters of the attention itself."""
    per_head, shared = [], []
    hidden = {layer.into for layer in tree.layers(name)}
    for local, shape in tree.own_params.get(name, {}).items():
        if not shape or (len(shape) == 1 and shape[0] in hidden and shape[0] not in counts):
            if not shape:
                shared.append(local)
            continue  # as wide as the hidden states: used outside of the heads
        if shape[0] in counts and (len(shape) > 1 or _is_per_head(local, shape[0], width, counts)):
            per_head.append(local)
        elif any(size in counts for size in shape) and width // counts[0] not in shape:
            return {}, f"its parameter {local} {list(shape)} has a row for every head"
        elif any(size >= width for size in shape):
            return {}, f"its parameter {local} {list(shape)} is as wide as all heads"
        else:
            shared.append(local)
    if not per_head:
        return ({name: "replicated_with_grad_allreduce"} if shared else {}), ""
    styles = {name: "local_params"} | {f"{name}.{local}": "head_params" for local in per_head}
    return styles | {f"{name}.{x}": "replicated_with_grad_allreduce" for x in shared}, ""


def _is_per_head(local: str, size: int, width: int, counts: tuple[int, int]) -> bool:
    """Whether a vector has one entry for each head, and not one for each feature of a head."""
    return size != width // counts[0] or _PER_HEAD.search(local) is not None


def _child(
    tree: Tree, child: str, claimed: Collection[str], counts: tuple[int, int], width: int
) -> tuple[dict[str, str], str]:
    kind, leaf = tree.kind(child), last(child)
    if kind == "Embedding":
        rows = tree.own_params[child].get("weight", (0, 0))
        if rows[1] == counts[0]:
            return {child: "head_embedding"}, ""
        if rows[1] == width // counts[0]:  # one table for every head: each rank has a term
            return {child: "replicated_with_grad_allreduce"}, ""
        return {}, f"it has a table {leaf} of its own"
    if "norm" in kind.lower() or "norm" in leaf.lower():
        return _norm(tree, child, counts, width)
    if kind in LINEAR or "Linear" in kind:
        return {}, f"it has a further layer {leaf}"
    own = tree.own_params.get(child, {})
    deeper = any(tree.own_params.get(name) for name in tree.below(child))
    if own and not deeper and all(shape and shape[0] in counts for shape in own.values()):
        return {child: "head_params"}, ""
    if leaf in ("indexer", "output"):
        return {}, ""  # an indexer chooses tokens for all heads, from what is whole
    return {}, f"it has a part {leaf} ({kind}) whose use of the heads is not known"


def _norm(
    tree: Tree, child: str, counts: tuple[int, int], width: int
) -> tuple[dict[str, str], str]:
    """A norm between the projections, on every head or on the whole width, or outside of them."""
    leaf, above = last(child), child.rpartition(".")[0]
    shapes = list(tree.own_params.get(child, {}).values())
    if not shapes:
        return {}, f"it has one norm for every head ({leaf})"
    size = shapes[0][0] if shapes[0] else 0
    if _ON_OUTPUT.search(leaf) and size == width:
        return {child: "split_norm"}, ""
    if not _ON_HEADS.search(leaf) or tree.kind(above) in known.INPUT_NORMS or "_a_" in leaf:
        return {}, ""  # on the hidden states, before or after
    if len(shapes[0]) > 1 and size in counts:
        return {child: "head_params"}, ""
    on_heads = known.QUERY | known.KEY
    projections = {layer.width for layer in tree.layers(above) if layer.role in on_heads} | {width}
    per_head = width // counts[0]
    if size in projections and size != per_head:
        return {child: "split_norm"}, ""
    if size < width and width % size == 0:
        return {child: "replicated_with_grad_allreduce"}, ""
    return {}, f"its norm {leaf} over {size} features fits neither a head nor the whole width"
