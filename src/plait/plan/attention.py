"""Attention in a plan: which of its entries are made of heads, how many heads there are, and cuts.

An *attention* is the module that holds the query projection (or the fused one). What it knows of
its heads comes from its own integers, from those of the nearest config, and from the widths of its
projections, which have the last word.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from plait.errors import LayoutError, PlanError
from plait.plan import roles
from plait.plan.cuts import Cut, Run, cut, one_kind, per_group, sections
from plait.plan.heads import Attention, head_map
from plait.plan.names import ModelNames
from plait.plan.plan import Entry, Plan
from plait.plan.rules import generalize


@dataclass(frozen=True)
class _Block:
    """One attention before its heads are dealt out."""

    name: str
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    entries: tuple[Entry, ...]


def with_heads(plan: Plan, names: ModelNames, num_ranks: int) -> Plan:
    """The plan with a head map for every attention it splits, and the cuts that follow from it.

    Args:
        plan: The resolved plan.
        names: The model.
        num_ranks: Ranks to split over.

    Raises:
        LayoutError: An attention has fewer query heads than there are ranks, its heads do not fit
            the widths of its projections, or only some of its projections are split.
        PlanError: `mla_kv_a_proj` on a model whose config has no `qk_rope_head_dim`.
    """
    attention: dict[str, Attention] = {}
    cuts: dict[str, Cut] = {}
    problems: dict[str, None] = {}
    for block in _blocks(plan, names):
        try:
            _check_complete(block, plan, names)
            heads = head_map(block.num_heads, block.num_kv_heads, num_ranks)
            found = Attention(block.name, block.qk_dim, block.v_dim, heads)
            for entry in block.entries:
                runs = _runs(entry, found, names)
                if runs is not None:
                    cuts[entry.name] = cut(runs, heads)
        except LayoutError as error:
            problems |= dict.fromkeys(f"{generalize(block.name)}: {p}" for p in error.problems)
            continue
        attention[block.name] = found
    if problems:
        raise LayoutError(
            f"tp_size={num_ranks} for the attention of {names.model}:",
            list(problems),
            ["a smaller tp_size", "the style 'replicate' for the attention's projections"],
        )
    return replace(plan, attention=attention, cuts=cuts, rope_dims=_rope_dims(plan, names))


def _check_complete(block: _Block, plan: Plan, names: ModelNames) -> None:
    """Refuse an attention of which the keys or values are not split with the queries."""
    inside = {entry.name for entry in block.entries}
    styles = {entry.name: entry.style for entry in plan.entries}
    problems = []
    for name, kind in names.modules.items():
        place = _parent(roles.projection(name))
        if place != block.name or name in inside or kind not in ("Linear", "Conv1D"):
            continue
        if roles.role(name, "") in ("k", "v"):
            last = name.rpartition(".")[2]
            problems.append(f"{last!r} has the style {styles.get(name)!r}, the queries are split")
    if problems:
        raise LayoutError("An attention that is split in part:", problems, [])


def _rope_dims(plan: Plan, names: ModelNames) -> dict[str, int]:
    found: dict[str, int] = {}
    missing = []
    for entry in plan.entries:
        if entry.style == "mla_kv_a_proj" and entry.kind == "module":
            rope = _facts(_parent(entry.name), names).get("qk_rope_head_dim")
            if rope is None:
                missing.append(f"{entry.name!r}: no qk_rope_head_dim in the config or its module")
            else:
                found[entry.name] = rope
    if missing:
        raise PlanError(
            "The style 'mla_kv_a_proj' needs the size of the rotary key:",
            missing,
            ["set qk_rope_head_dim in the config", "the style 'replicate'"],
        )
    return found


def _blocks(plan: Plan, names: ModelNames) -> Iterator[_Block]:
    """Every attention whose heads the plan splits."""
    blocks: dict[str, list[Entry]] = {}
    for entry in plan.entries:
        if entry.style in roles.HEAD_STYLES and roles.is_query(entry.name, entry.style):
            blocks.setdefault(_parent(roles.projection(entry.name)), [])
    for entry in plan.entries:
        found = _block_of(entry, blocks) if entry.style in roles.HEAD_STYLES else None
        if found is not None:
            blocks[found].append(entry)
    unknown = []
    for name, entries in blocks.items():
        mine = _of_heads(name, entries, names)
        block = _block(name, mine, names)
        if block is not None:
            yield block
        elif _is_whole_attention(mine):
            unknown.append(generalize(name))
    if unknown:
        raise LayoutError(
            f"The attention of {names.model}:",
            [
                f"{name!r} is split, and nothing tells how many heads it has"
                for name in dict.fromkeys(unknown)
            ],
            [
                "set num_heads or head_dim on the module, before it is split",
                "the style 'replicate' for the attention's projections",
            ],
        )


def _is_whole_attention(entries: list[Entry]) -> bool:
    """Whether entries are those of queries, keys, values and the output, and no lone layer."""
    found = {roles.role(e.name, e.style) for e in entries if e.style != "split_norm"}
    both = {"k", "v"} <= found or bool(found & {"kv", "kv_b"})
    return "o" in found and ("qkv" in found or ("q" in found and both))


def _of_heads(name: str, entries: list[Entry], names: ModelNames) -> list[Entry]:
    """The entries of an attention without those of an MLP that its module holds as well."""
    outputs = [e for e in entries if e.style == "rowwise"]
    likely = [e for e in outputs if _parent(e.name) == name and roles.is_output(e.name)]
    if len(outputs) < 2 or len(likely) != 1:
        return entries
    width = _entry_width(likely[0], names) or 0
    found = []
    for entry in entries:
        if entry.style == "rowwise":
            mine = entry is likely[0]
        elif entry.style == "colwise" and roles.role(entry.name, "colwise") == "heads":
            mine = roles.is_extra(entry.name) and width % (_entry_width(entry, names) or 1) == 0
        else:
            mine = True
        if mine:
            found.append(entry)
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _block_of(entry: Entry, blocks: Mapping[str, list[Entry]]) -> str | None:
    """The attention that an entry belongs to: the module above it, or a child of one of these."""
    start = above = _parent(roles.projection(entry.name))
    while above:
        if above in blocks:
            return above
        below = [name for name in blocks if _parent(name) == above]
        named = "att" in above.rpartition(".")[2].lower()
        if len(below) == 1 and named and entry.style == "rowwise":
            return below[0]
        if start.count(".") - above.count(".") >= 2:
            return None
        above = _parent(above)
    return above if above in blocks else None


def _facts(name: str, names: ModelNames) -> Mapping[str, int]:
    """Integers that hold for a module: its own before those of the nearest config above it."""
    found: dict[str, int] = {
        key.removeprefix("config."): value
        for key, value in names.facts.get("", {}).items()
        if "." not in key
    }
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        for key, value in names.facts.get(".".join(parts[:end]), {}).items():
            if key.startswith("config."):
                found[key.removeprefix("config.")] = value
    return found | {k: v for k, v in names.facts.get(name, {}).items() if "." not in k}


def _width(entry: Entry, names: ModelNames, dim: int) -> int | None:
    """Features of a linear layer: dim 0 out, dim 1 in."""
    shape = names.params.get(f"{entry.name}.weight")
    if shape is None or len(shape) != 2:
        return None
    return shape[1 - dim] if names.modules.get(entry.name) == "Conv1D" else shape[dim]


def _block(name: str, entries: list[Entry], names: ModelNames) -> _Block | None:
    facts = _facts(name, names)
    widths = {roles.role(e.name, e.style): _entry_width(e, names) for e in entries}
    num_heads = _first(facts, roles.NUM_HEADS)
    head_dim = _first(facts, roles.HEAD_DIM)
    out = widths.get("o")
    own = names.facts.get(name, {})
    own_heads = _first(own, roles.NUM_HEADS)
    if own_heads and out and out % own_heads == 0 and _first(own, roles.HEAD_DIM) is None:
        head_dim = out // own_heads  # a head size in the config may be that of other attention
    v_dim = facts.get("v_head_dim") or head_dim
    if v_dim and out and out % v_dim == 0:
        num_heads = out // v_dim
    elif num_heads and out and out % num_heads == 0:
        v_dim = out // num_heads
    elif num_heads is None and head_dim and widths.get("q"):
        num_heads = int(widths["q"] or 0) // head_dim
    if not num_heads:
        return None
    if v_dim is None and widths.get("q"):
        v_dim = int(widths["q"] or 0) // num_heads
    qk_dim = facts.get("qk_head_dim") or head_dim or v_dim or 0
    num_kv = _num_kv(widths, facts, num_heads, qk_dim, v_dim or 0)
    return _Block(name, num_heads, num_kv, qk_dim, v_dim or 0, tuple(entries))


def _num_kv(
    widths: Mapping[str, int | None],
    facts: Mapping[str, int],
    num_heads: int,
    qk_dim: int,
    v_dim: int,
) -> int:
    if "kv_b" in widths:
        return num_heads
    for role, size in (("k", qk_dim), ("v", v_dim)):
        width = widths.get(role)
        if width and size and width % size == 0:
            return width // size
    both = widths.get("kv")
    if both and qk_dim and v_dim and both % (qk_dim + v_dim) == 0:
        return both // (qk_dim + v_dim)
    fused = widths.get("qkv")
    if fused and qk_dim and v_dim:
        rest = fused - num_heads * qk_dim
        if rest > 0 and rest % (qk_dim + v_dim) == 0:
            return rest // (qk_dim + v_dim)
    return _first(facts, roles.NUM_KV_HEADS) or num_heads


def _entry_width(entry: Entry, names: ModelNames) -> int | None:
    return _width(entry, names, 1 if entry.style == "rowwise" else 0)


def _first(facts: Mapping[str, int], keys: tuple[str, ...]) -> int | None:
    return next((facts[key] for key in keys if facts.get(key, 0) > 0), None)


def _runs(entry: Entry, found: Attention, names: ModelNames) -> tuple[Run, ...] | None:
    """The heads that the split dimension of one entry consists of; None where it has no size."""
    heads = found.heads
    role = roles.role(entry.name, entry.style)
    if entry.kind == "param":
        width: int | None = names.params[entry.name][0]
    elif entry.style in ("head_params", "split_norm"):
        shapes = [s for n, s in names.params.items() if names.owners[n] == entry.name and s]
        width = shapes[0][0] if shapes else None
    elif entry.style == "head_embedding":
        width = names.params[f"{entry.name}.weight"][1]
    else:
        width = _entry_width(entry, names)
    if width is None:
        return None
    runs: tuple[Run, ...]
    if role == "qkv":
        qk, v = found.qk_dim, found.v_dim
        runs = sections(heads, qk, v) if entry.style == "colwise_qkv" else per_group(heads, qk, v)
    elif role == "kv":
        qk, v, num = found.qk_dim, found.v_dim, heads.num_kv_heads
        runs = one_kind("kv", num, qk + v)
        if entry.style == "colwise_kv":
            runs = one_kind("kv", num, qk) + one_kind("kv", num, v)
    else:
        of_kv = role in ("k", "v")
        num = heads.num_kv_heads if of_kv else heads.num_heads
        if width % num:
            raise _refusal(entry, width, num)
        runs = one_kind("kv" if of_kv else "q", num, width // num)
    if sum(run.size for run in runs) != width:
        raise _refusal(entry, width, heads.num_heads)
    return runs


def _refusal(entry: Entry, width: int, num: int) -> LayoutError:
    return LayoutError(
        f"Heads of {entry.name!r} (rule {entry.rule!r}, style {entry.style!r}):",
        f"{generalize(entry.name)!r} ({entry.style!r}): width {width} is not made of {num} heads",
        ["the style 'replicate' for this attention", "another layout of fused heads"],
    )
