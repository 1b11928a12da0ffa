"""A plan for a model that ships none, from its names, shapes and integers alone.

What is recognised: attention (separate, fused and low-rank projections, with an output projection
beside or in a sibling), MLPs, embeddings and heads, and what lies between their layers. A block
whose heads or channels cannot be split, but whose layers are only called, has these cut and
gathered around. What is left stays whole, with a reason.

The rules are a proposal, made without running anything: knowledge about names and classes fills
the gaps that shapes leave. They are to be proven on a small copy before they are used.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from plait.plan import words as known
from plait.plan.derive.attention import attention
from plait.plan.derive.ends import ends
from plait.plan.derive.mlp import experts, mixers, mlps, receptance
from plait.plan.derive.tree import LINEAR, Found, Tree, parent
from plait.plan.names import ModelNames
from plait.plan.rules import LAYER_NUMBER, generalize

UNKNOWN = "not part of an attention, MLP, embedding or head that is recognised"


@dataclass(frozen=True)
class Derived:
    """A derived plan.

    Attributes:
        rules: Pattern → style, as a plan has them.
        whole: Pattern → why this module's parameters stay whole, or, where rules cut its layers
            nevertheless, why what it computes is not split.
    """

    rules: dict[str, str]
    whole: dict[str, str]


def derive(names: ModelNames) -> Derived:
    """Find a tensor-parallel plan for a model.

    Args:
        names: The model; `names.facts` should hold the integers of its modules and configs.

    Returns:
        The rules, and the reasons for what stays whole. Rules name only what exists, and no module
        has two styles.
    """
    tree, found = Tree(names), Found()
    receptance(tree, found)
    mixers(tree, found)
    attention(tree, found)
    mlps(tree, found)
    experts(tree, found)
    ends(tree, found)
    _rest(tree, found)
    rules = _patterns(found.styles, [*names.modules, *names.params])
    whole: dict[str, str] = {}
    for name, why in found.reasons.items():
        if found.styles.get(name, "replicate") == "replicate":
            whole.setdefault(generalize(name), why)
    return Derived(rules, whole)


def _rest(tree: Tree, found: Found) -> None:
    """A reason for every matrix that nothing has claimed."""
    for name, kind in tree.names.modules.items():
        if name in found.styles or name in found.seen or name in found.reasons:
            continue
        shapes = tree.own_params.get(name, {})
        large = [local for local, shape in shapes.items() if len(shape) > 1]
        if not large or any(f"{name}.{local}" in found.styles for local in large):
            continue
        above = tree.kind(parent(name))
        if above in known.READS_WEIGHTS:
            found.reasons[name] = f"{above}: {known.READS_WEIGHTS[above]}"
        elif kind in LINEAR or kind == "Embedding":
            found.reasons[name] = UNKNOWN
        elif max(len(shapes[local]) for local in large) == 3 and "expert" in name.lower():
            found.reasons[name] = "stacked experts in a layout of their own"
        else:
            found.reasons[name] = f"{kind} holds parameters of its own"


def _patterns(styles: Mapping[str, str], existing: Iterable[str]) -> dict[str, str]:
    """Concrete decisions as rules: as general as they can be without naming anything else."""
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in existing:
        by_pattern[generalize(name)].append(name)
    rules: dict[str, str] = {}
    for pattern, members in by_pattern.items():
        decided = {name: styles.get(name, "") for name in members}
        if set(decided.values()) == {""}:
            continue
        if len(set(decided.values())) == 1:
            rules[pattern] = decided[members[0]]
        else:
            rules |= _narrower(decided)
    return rules


def _narrower(decided: Mapping[str, str]) -> dict[str, str]:
    """Rules with some numbers written out, for names that one pattern would throw together."""
    rules: dict[str, str] = {}
    left = dict(decided)
    for candidate in _literal_positions(next(iter(decided))):
        groups: dict[str, set[str]] = defaultdict(set)
        for name in decided:
            groups[_pattern(name, candidate)].add(decided[name])
        for name in [*left]:
            styles = groups[_pattern(name, candidate)]
            if len(styles) == 1:
                style = left.pop(name)
                if style:
                    rules[_pattern(name, candidate)] = style
    return rules


def _literal_positions(name: str) -> Iterator[tuple[int, ...]]:
    """Which numbers of a name to write out: the last alone first, all of them at the end."""
    numbers = [n for n, part in enumerate(name.split(".")) if part.isdigit()]
    for count in range(1, len(numbers) + 1):
        yield from sorted(combinations(numbers, count), reverse=True)


def _pattern(name: str, literal: tuple[int, ...]) -> str:
    parts = enumerate(name.split("."))
    return ".".join(
        LAYER_NUMBER if part.isdigit() and n not in literal else part for n, part in parts
    )
