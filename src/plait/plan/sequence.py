"""Where activations are split along the sequence, decided from names and a tensor-parallel plan.

A model's blocks stand in lists. From the first block of a list to its last a rank holds its tokens
only. Inside of a block

* a *region* is called with all tokens: the module that holds column-parallel layers (an attention,
  an MLP, a mixture of experts), or one that nothing is known of;
* a row-parallel layer sums its terms and keeps the rank's tokens; where that is not possible the
  whole region's output is cut;
* all else (norms, dropouts, residuals, scales) treats every token by itself and so works on the
  rank's tokens. The gradients of its parameters are terms of a sum.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plait.plan.names import ModelNames
from plait.plan.plan import Plan
from plait.plan.roles import FUSED
from plait.plan.rules import generalize

_COLUMNS = frozenset(
    {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "mla_kv_a_proj", *FUSED}
)
_ROWS = frozenset({"rowwise", "packed_rowwise", "rowwise_rep", "rowwise_split_input"})
_SLICED = frozenset({"rowwise_rep", "rowwise_split_input"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_OTHER_SUMS = frozenset({"moe_tp_experts", "all_reduce", "embedding_rowwise"})
_LISTS = frozenset({"ModuleList"})
_CONTAINERS = frozenset({"ModuleList", "ModuleDict", "Sequential"})
_TOWERS = ("vision", "visual", "image", "audio", "video", "speech")
_PER_TOKEN = frozenset(
    {"Identity", "Dropout", "Linear", "Conv1D", "ReLU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid"}
    | {"LeakyReLU", "ELU", "CELU", "SELU", "Softplus", "Hardswish", "Hardtanh", "ReLU6", "PReLU"}
)
BY_TOKEN = ("per_layer_input", "per_layer_inputs")
"""Arguments of blocks with a row for every token, which a block's own code uses."""
_NO_TOKENS = ("rotary", "rope")
_OTHER_NORMS = ("batchnorm", "groupnorm", "instancenorm")


@dataclass(frozen=True)
class Region:
    """A module that is called with all tokens.

    Attributes:
        name: Its name.
        cuts_output: Whether its output is whole and cut to the rank's tokens as it leaves; else
            row-parallel layers inside or behind it leave the rank's tokens.
        terms: Layers inside whose output is left a term of a sum, which is made, and cut, as the
            region's output leaves.
    """

    name: str
    cuts_output: bool
    terms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """One list of blocks.

    Attributes:
        name: Name of the list.
        owner: The module that holds it, whose forward calls the blocks.
        blocks: Names of the blocks, in order.
        regions: What is called with all tokens.
        rows: Row-parallel layers that leave the rank's tokens.
        per_token: Modules that see the rank's tokens only, so that the gradients of the parameters
            that they hold themselves are summed.
    """

    name: str
    owner: str
    blocks: tuple[str, ...]
    regions: tuple[Region, ...]
    rows: tuple[str, ...]
    per_token: tuple[str, ...]


@dataclass(frozen=True)
class SequencePlan:
    """Where the activations of one model are split along the sequence.

    Attributes:
        stacks: Its lists of blocks.
        whole: List → why its activations stay whole.
    """

    stacks: tuple[Stack, ...]
    whole: Mapping[str, str] = field(default_factory=dict)

    def without(self, names: Collection[str], why: str) -> "SequencePlan":
        """These decisions without some lists of blocks."""
        kept = tuple(stack for stack in self.stacks if stack.name not in names)
        return SequencePlan(kept, {**self.whole, **dict.fromkeys(names, why)})

    def __str__(self) -> str:
        rows: dict[str, int] = {}
        for stack in self.stacks:
            rows[f"{generalize(stack.name)}  blocks"] = len(stack.blocks)
            parts = [(r.name, _in_words(r)) for r in stack.regions]
            parts += [(name, "sum → cut") for name in stack.rows]
            parts += [(name, "own tokens") for name in stack.per_token]
            for name, what in parts:
                line = f"{generalize(name)}  {what}"
                rows[line] = rows.get(line, 0) + 1
        lines = [f"{line} × {count}" for line, count in rows.items()]
        return "\n".join([*lines, *(f"{name}  whole: {why}" for name, why in self.whole.items())])


def sequence_plan(names: ModelNames, plan: Plan, sums_late: bool = False) -> SequencePlan:
    """Decide where activations are split along the sequence.

    Args:
        names: The model.
        plan: Its tensor-parallel plan.
        sums_late: Sum what experts give only as it leaves their region. It saves bytes, and is
            right where the region's code adds up what the experts give and does no more.

    Returns:
        The decisions; no stack where no list of blocks is split over the ranks.
    """
    styles = {entry.name: entry.style for entry in plan.entries if entry.kind == "module"}
    whole: dict[str, str] = {}
    stacks = []
    for name in _lists(names, styles):
        if any(word in name.lower() for word in _TOWERS):
            whole[name] = "blocks of pictures or sounds"
        else:
            stacks.append(_Finder(names, styles, sums_late).stack(name))
    return SequencePlan(tuple(stacks), whole)


def _in_words(region: Region) -> str:
    if region.terms:
        return "all tokens → sum → cut"
    return "all tokens" + " → cut" * region.cuts_output


def _lists(names: ModelNames, styles: Mapping[str, str]) -> list[str]:
    """The outermost lists whose members hold layers that are split."""
    found: dict[str, None] = {}
    for name, style in styles.items():
        if style not in _COLUMNS | _ROWS:
            continue
        parts = name.split(".")
        for end in range(1, len(parts) - 1):
            above = ".".join(parts[:end])
            if names.modules.get(above) in _LISTS and parts[end].isdigit():
                found[above] = None
                break
    return list(found)


class _Finder:
    """Goes through the blocks of one list."""

    def __init__(self, names: ModelNames, styles: Mapping[str, str], sums_late: bool) -> None:
        self.sums_late = sums_late
        self.modules = names.modules
        self.styles = styles
        self.dims: dict[str, list[int]] = {}
        for param, owner in names.owners.items():
            self.dims.setdefault(owner, []).append(len(names.params[param]))
        self.children: dict[str, list[str]] = {}
        for name in names.modules:
            if name:
                self.children.setdefault(name.rpartition(".")[0], []).append(name)
        self.regions: list[Region] = []
        self.rows: list[str] = []
        self.per_token: list[str] = []

    def stack(self, name: str) -> Stack:
        blocks = self.children[name]
        for block in blocks:
            units = self._units(block)
            self._inside(block, units)
        return Stack(
            name,
            name.rpartition(".")[0],
            tuple(blocks),
            tuple(self.regions),
            tuple(self.rows),
            tuple(self.per_token),
        )

    def _units(self, block: str) -> frozenset[str]:
        """Modules that hold layers which take all tokens: what these are called with is whole."""
        found = set()
        for name, style in self.styles.items():
            if style in _COLUMNS | _SLICED | _OTHER_SUMS and name.startswith(f"{block}."):
                above = name.rpartition(".")[0]
                while above != block and self.modules[above] in _CONTAINERS:
                    above = above.rpartition(".")[0]
                found.add(name if above == block else above)
        return frozenset(found)

    def _inside(self, name: str, units: frozenset[str]) -> None:
        """A module whose code sees the rank's tokens only."""
        self.per_token.append(name)
        for child in self.children.get(name, ()):
            self._part(child, units)

    def _part(self, name: str, units: frozenset[str]) -> None:
        kind = self.modules[name]
        below = [other for other in self.styles if other.startswith(f"{name}.")]
        if name in units:
            self._region(name)
        elif self.styles.get(name) in _ROWS:
            self.rows.append(name)
        elif kind in _CONTAINERS or any(self.styles[b] in _COLUMNS | _ROWS for b in below):
            self._inside(name, units)
        elif not below and self._is_per_token(name):
            self.per_token.append(name)
        elif not any(word in kind.lower() for word in _NO_TOKENS):
            self.regions.append(Region(name, cuts_output=True))

    def _region(self, name: str) -> None:
        inside = {
            other: style
            for other, style in self.styles.items()
            if other == name or other.startswith(f"{name}.")
        }
        rows = [other for other, style in inside.items() if style in _ROWS]
        others = [other for other, style in inside.items() if style in _OTHER_SUMS]
        late = self.sums_late and {inside[other] for other in others} == {"moe_tp_experts"}
        nested = any(row.startswith(f"{other}.") for row in rows for other in others)
        if late and not nested and name not in others:
            self.regions.append(Region(name, cuts_output=False, terms=(*others, *rows)))
            return
        gathered = not rows and any(style in _GATHERED for style in inside.values())
        if others or gathered or len(rows) > 1:
            self.regions.append(Region(name, cuts_output=True))
            return
        self.regions.append(Region(name, cuts_output=False))
        self.rows += rows

    def _is_per_token(self, name: str) -> bool:
        """Whether a module without modules below it treats every token by itself."""
        kind = self.modules[name]
        if self.children.get(name):
            return False
        if kind in _PER_TOKEN or kind.endswith("Activation"):
            return True
        low = kind.lower()
        norm = ("norm" in low and not any(word in low for word in _OTHER_NORMS)) or "scale" in low
        return norm and max(self.dims.get(name, [0])) <= 1
