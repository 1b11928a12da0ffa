"""Tied parameters: two modules hold one tensor, so their styles must cut it in the same way.

The embedding and the output head of a language model are the common case. Where the plan names
only one of them, or names both with cuts that differ, the other follows the one that the user
named, or else the embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# style → dimension of the 2-D weight that it cuts; None: the weight stays whole.
CUT_DIM: dict[str, int | None] = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}


@dataclass(frozen=True)
class TiedUse:
    """One module that holds a tied weight.

    Attributes:
        module: Its name.
        is_embedding: Whether it looks rows up (an embedding) or multiplies (a linear layer).
        style: The style that the plan gives it, or None.
        explicit: Whether the user asked for that style.
    """

    module: str
    is_embedding: bool
    style: str | None
    explicit: bool


def follow(use: TiedUse, dim: int | None) -> str:
    """The style with which `use` works on a weight that is cut along `dim`."""
    if dim is None:
        return "replicate"
    if use.is_embedding:
        return "embedding_rowwise" if dim == 0 else "embedding_colwise"
    return "colwise_gather_output" if dim == 0 else "rowwise_split_input"


def agree(uses: Sequence[TiedUse]) -> tuple[Mapping[str, str], str | None]:
    """Styles under which all holders of one tied weight agree on its cut.

    Args:
        uses: Every module that holds the weight.

    Returns:
        `(changes, problem)`: module → style for each holder whose style has to change, and a
        sentence where the user named two styles that cannot both hold.
    """
    named = [use for use in uses if use.style in CUT_DIM]
    if not named:
        return {}, None
    explicit = [use for use in named if use.explicit]
    first = (explicit or [use for use in named if use.is_embedding] or named)[0]
    dim = CUT_DIM[str(first.style)]
    for use in explicit:
        other = CUT_DIM[str(use.style)]
        if other != dim:
            return {}, (
                f"{first.module!r} and {use.module!r} hold one tied weight, but {first.style!r} "
                f"and {use.style!r} cut it differently (dims {dim} and {other})"
            )
    changes = {
        use.module: follow(use, dim)
        for use in uses
        if (use.style is None and dim is not None)
        or (use.style in CUT_DIM and CUT_DIM[str(use.style)] != dim)
    }
    return changes, None
