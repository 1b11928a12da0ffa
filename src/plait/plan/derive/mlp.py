"""MLPs and mixers of a model that ships no plan."""

import re
from collections.abc import Sequence

from plait.plan import words as known
from plait.plan.derive.tree import LINEAR, Found, Layer, Tree, last

_CONVOLUTION = re.compile(r"Conv\d?d|Conv$")


def mlps(tree: Tree, found: Found) -> None:
    """Decide about every MLP: the layers that widen, and the one that comes back."""
    for name in tree.names.modules:
        free = [layer for layer in tree.layers(name) if layer.name not in found.seen]
        if free and not known.MIXERS.search(tree.kind(name)):
            for ups, down in _triples(tree, name, free):
                _decide(tree, name, ups, down, found)
        _beside(tree, name, found)


def mixers(tree: Tree, found: Found) -> None:
    """Cut the layers of recurrences and convolutions that are only called; the rest stays whole."""
    for name, kind in tree.names.modules.items():
        if not known.MIXERS.search(kind) or kind == "RwkvFeedForward":
            continue
        free = [layer for layer in tree.layers(name) if layer.name not in found.seen]
        if not free:
            continue
        found.reasons[name] = f"{kind} mixes tokens with all of its channels"
        ins = [x for x in free if x.role in known.MIXER_IN and x.width >= x.into // 8]
        outs = [x for x in free if x.role in known.MIXER_OUT]
        reads = known.KERNEL_READS.search(kind) is not None
        found.gathered(ins, None if reads or len(outs) != 1 else outs[0])
        if reads:
            for layer in outs:
                found.whole(layer, "fused kernels read its weight")


def experts(tree: Tree, found: Found) -> None:
    """Cut the width of stacked experts, where their parameters have the common names and shapes."""
    for name, kind in tree.names.modules.items():
        own = tree.own_params.get(name, {})
        up, down = own.get("gate_up_proj", ()), own.get("down_proj", ())
        if "Experts" not in kind or len(down) != 3:
            continue
        separate = {part: own[part] for part in ("gate_proj", "up_proj") if part in own}
        if set(own) - {"gate_up_proj", "down_proj", *separate}:
            found.reasons[name] = "experts with biases or scales of their own"
        elif up[1:] == (2 * down[2], down[1]):
            _stacked(tree, name, {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}, found)
        elif up[1:] == (down[2], 2 * down[1]):
            _stacked(tree, name, {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}, found)
        elif separate and all(shape[1:] == (down[2], down[1]) for shape in separate.values()):
            _stacked(
                tree, name, dict.fromkeys(separate, "colwise") | {"down_proj": "rowwise"}, found
            )


def _stacked(tree: Tree, name: str, params: dict[str, str], found: Found) -> None:
    norms = [child for child in tree.children.get(name, ()) if "norm" in last(child).lower()]
    if norms:  # on what each expert gives, before the ranks' terms are summed
        found.reasons[name] = f"its experts end in a norm ({last(norms[0])})"
        return
    found.styles |= {f"{name}.{param}": style for param, style in params.items()}
    found.styles[name] = "moe_tp_experts"


def receptance(tree: Tree, found: Found) -> None:
    """The MLP of RWKV: key widens, value comes back, receptance gates the result."""
    for name, kind in tree.names.modules.items():
        if kind != "RwkvFeedForward":
            continue
        layers = {layer.role: layer for layer in tree.layers(name)}
        if {"key", "value", "receptance"} <= set(layers):
            found.style(layers["key"], "colwise")
            found.style(layers["value"], "rowwise")
            found.style(layers["receptance"], "colwise_gather_output")


def _triples(tree: Tree, name: str, free: Sequence[Layer]) -> list[tuple[list[Layer], Layer]]:
    """The MLPs among the layers of one module, each as (layers that widen, layer that ends it)."""
    by_role = {layer.role: layer for layer in free}
    found = []
    for names in known.GATED + known.PAIRS:
        if all(part in by_role for part in names):
            *ups, down = (by_role.pop(part) for part in names)
            if _fits(ups, down):
                found.append((ups, down))
            else:
                by_role |= {layer.role: layer for layer in (*ups, down)}
    rest = list(by_role.values())
    if not found and _by_shape(tree, name, rest):
        found.append((rest[:-1], rest[-1]))
    return found


_INNER_NORM = re.compile(r"sub_?(norm|ln)|ffn_(layer)?norm|ffn_layernorm|inner|mid|ffn_ln")


def _by_shape(tree: Tree, name: str, rest: Sequence[Layer]) -> bool:
    """An MLP by its shapes alone: one or two equal layers, and one that reads what they make."""
    if not 2 <= len(rest) <= 3 or known.NOT_MLP.search(f"{tree.kind(name)} {last(name)}"):
        return False
    ups, down = rest[:-1], rest[-1]
    named = known.MLP_CLASS.search(f"{tree.kind(name)} {last(name)}") is not None
    widens = ups[0].width > ups[0].into and down.width == ups[0].into
    in_order = tree.kind(name) == "Sequential" or named or widens
    same = len({(x.width, x.into) for x in ups}) == 1
    claimed = {layer.name for layer in tree.layers(name)}
    in_order = in_order and not _other_matrices(tree, name, claimed)
    return in_order and same and _fits(ups, down) and (named or widens or len(ups) == 1)


def _other_matrices(tree: Tree, name: str, claimed: set[str]) -> bool:
    """Whether a module has more parts that compute something: an MLP of shapes alone has none."""
    return any(
        len(shape) > 1
        for below in tree.below(name)
        if below not in claimed
        for shape in tree.own_params.get(below, {}).values()
    )


def _fits(ups: Sequence[Layer], down: Layer) -> bool:
    if len(ups) == 2:
        return all(up.width == down.into for up in ups) and ups[0].into == ups[1].into
    packed = ups[0].width == 2 * down.into and ups[0].into == down.width
    return len(ups) == 1 and (ups[0].width == down.into or packed)


def _decide(tree: Tree, name: str, ups: Sequence[Layer], down: Layer, found: Found) -> None:
    width = down.into
    if known.NOT_MLP.search(f"{tree.kind(name)} {last(name)}"):
        return
    extra, reason = _between(tree, name, width, {*(x.name for x in ups), down.name})
    if reason:
        found.reasons[name] = f"computed whole: {reason}"
        found.gathered(ups, down)
        return
    style = "packed_colwise" if len(ups) == 1 and ups[0].width == 2 * width else "colwise"
    for up in ups:
        found.style(up, style)
    found.style(down, "rowwise")
    found.styles |= extra
    _adapters(tree, name, ups[0], style, found)
    if tree.kind(name) in known.STATISTICS:
        found.styles[name] = "split_statistics"


def _between(tree: Tree, name: str, width: int, claimed: set[str]) -> tuple[dict[str, str], str]:
    """Styles for what lies between the layers of an MLP, or why they cannot be split."""
    styles: dict[str, str] = {}
    outside = {layer.into for layer in tree.layers(name) if layer.name in claimed} - {width}
    met = 0
    for child in tree.children.get(name, ()):
        met += sum(layer == child or layer.startswith(f"{child}.") for layer in claimed)
        kind, own = tree.kind(child), tree.own_params.get(child, {})
        if child in claimed or kind in LINEAR or not tree.has_params(child):
            continue
        sizes = {shape[0] for shape in own.values() if shape}
        if "norm" in kind.lower():
            # It stands between the layers, or its name says that it does.
            between = bool(outside) and 0 < met < len(claimed)
            inner = between or _INNER_NORM.search(last(child)) is not None
            if width in sizes and width not in outside and inner:
                styles[child] = "split_norm"
        elif _CONVOLUTION.search(kind) or "DWConv" in kind or "Depthwise" in kind:
            return {}, f"{last(child)} ({kind}) convolves its channels"
        elif own and not list(tree.below(child)):
            if all(shape in ((), (1,)) for shape in own.values()):
                styles[child] = "replicated_with_grad_allreduce"
            elif width in sizes:
                return {}, f"{last(child)} ({kind}) has a parameter for every channel"
    own = tree.own_params.get(name, {})
    wide = [local for local, shape in own.items() if width in shape and width not in outside]
    return ({}, f"its parameter {wide[0]} has an entry for every channel") if wide else (styles, "")


def _adapters(tree: Tree, name: str, up: Layer, style: str, found: Found) -> None:
    """Low-rank adapters whose result is added to that of the widening layer (Zamba2)."""
    for below in tree.below(name):
        if "adapter" not in below or up.width == up.into:  # of equal widths, its place is not known
            continue
        layer = tree.layer(below)
        if layer and layer.name not in found.seen and layer.width == up.width:
            found.style(layer, style)


def _beside(tree: Tree, name: str, found: Found) -> None:
    """An MLP spread over two siblings, as in BERT: `intermediate.dense` and `output.dense`."""
    children = {last(child): child for child in tree.children.get(name, ())}
    for first, second in (("intermediate", "output"), ("intermediate_query", "output_query")):
        if first not in children or second not in children:
            continue
        ups = [x for x in tree.layers(children[first]) if x.name not in found.seen]
        downs = [x for x in tree.layers(children[second]) if x.name not in found.seen]
        if len(ups) == 1 and len(downs) == 1 and _fits(ups, downs[0]):
            _decide(tree, children[second], ups, downs[0], found)
    if "w_in" in children and "w_out" in children:  # a gated first half of its own (CPM-Ant)
        ups, down = list(tree.layers(children["w_in"])), tree.layer(children["w_out"])
        if down and _fits(ups, down) and not {*(x.name for x in ups), down.name} & found.seen:
            _decide(tree, name, ups, down, found)
