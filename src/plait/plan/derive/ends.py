"""Embeddings and output heads of a model that ships no plan."""

from plait.plan import words as known
from plait.plan.derive.tree import Found, Layer, Tree, last, parent

_MANY_ROWS = 1000


def ends(tree: Tree, found: Found) -> None:
    """Decide about every embedding and every head over a vocabulary."""
    sizes = _vocabularies(tree)
    tied = _tied(tree)
    for name, kind in tree.names.modules.items():
        if kind == "Embedding" and name not in found.styles:
            _embedding(tree, name, sizes, name in tied, found)
    for name in tree.names.modules:
        layer = tree.layer(name)
        if layer is not None and layer.name == name and name not in found.seen:
            _head(tree, layer, sizes, tied, found)
    for name, kind in tree.names.modules.items():
        if known.HEAD_PARTS.search(kind):  # as in BERT: only called, so it can be gathered
            free = [x for x in tree.layers(name) if x.name not in found.seen]
            found.gathered([x for x in free if x.role == "dense"], None)


def _vocabularies(tree: Tree) -> set[int]:
    """Every size that a config calls a vocabulary."""
    found = set()
    for facts in tree.names.facts.values():
        for key, value in facts.items():
            if "vocab" in key and "type" not in key and value > 2:
                found.add(value)
    return found


def _tied(tree: Tree) -> set[str]:
    """Modules that share a weight with another one."""
    owners = tree.names.owners
    found = set()
    for name, first in tree.names.tied.items():
        if last(name) == "weight":
            found |= {owners[name], owners[first]}
    return found


def _partners(tree: Tree, name: str) -> set[str]:
    """The other modules that hold the weight of one."""
    tied, owners = tree.names.tied, tree.names.owners
    weight = f"{name}.weight"
    first = tied.get(weight, weight)
    same = {first} | {other for other, of in tied.items() if of == first}
    return {owners[param] for param in same if param in owners} - {name}


def _embedding(tree: Tree, name: str, sizes: set[int], tied: bool, found: Found) -> None:
    shape = tree.own_params.get(name, {}).get("weight", ())
    if len(shape) != 2:
        return
    leaf, above = _word(name), tree.kind(parent(name))
    if tree.children.get(name, ()):
        _replicated(name, "it has parts of its own that need the whole row", found)
    elif above in known.EMBEDDING_READERS:
        _replicated(name, f"{above} reads its weight itself", found)
    elif not (leaf in known.TOKENS or shape[0] in sizes) and (
        known.POSITIONS.search(leaf) or (shape[0] < _MANY_ROWS and not tied)
    ):
        found.reasons[name] = "positions, types and other small tables stay whole"
    elif tree.names.facts.get(name, {}).get("reads.self"):
        _replicated(name, f"the forward of {tree.kind(name)} reads its weight", found)
    elif tree.names.facts.get(parent(name), {}).get(f"reads.{leaf}") and not tied:
        _replicated(name, f"{above} reads its weight itself", found)
    else:
        found.styles[name] = "embedding_rowwise"


def _word(name: str) -> str:
    """The last part of a name that is no number: that of a list for its members."""
    leaf = last(name)
    return _word(parent(name)) if leaf.isdigit() else leaf


def _replicated(name: str, why: str, found: Found) -> None:
    """Whole, and said as a rule: it holds against one that a model ships."""
    found.styles[name] = "replicate"
    found.reasons[name] = why


def _head(tree: Tree, layer: Layer, sizes: set[int], tied: set[str], found: Found) -> None:
    above = tree.kind(parent(layer.name))
    if layer.name not in tied and layer.width not in sizes:
        return
    if layer.name not in tied and _word(layer.name) not in known.HEADS and layer.width < _MANY_ROWS:
        return
    if above in known.HEAD_READERS:
        found.whole(layer, f"{above} reads its weight itself")
    elif any(partner in found.reasons for partner in _partners(tree, layer.name)):
        found.whole(layer, "tied to an embedding that stays whole")
    else:
        found.style(layer, "colwise_gather_output")
