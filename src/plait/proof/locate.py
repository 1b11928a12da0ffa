"""Which module is to blame: from how every tensor is related to the whole one's.

The first tensor that differs is where a mistake shows, which is not always where it was made:

- A layer that leaves its terms unsummed gives "terms", and whoever adds a bias or a residual to
  them is the first to give something different.
- A layer that leaves slices where its user wants the whole (or the other way round) works; its user
  fails.
- What a module takes is computed by the code of the module that calls it. If that is the first to
  differ, the layers whose results this code has combined are looked at: the odd one out, if there
  is one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from plait.proof.match import Match
from plait.proof.record import Key


@dataclass(frozen=True)
class Culprit:
    """The module to look at, and why.

    Attributes:
        module: Its name; the model itself is `""`.
        why: What it does, in words.
    """

    module: str
    why: str


@dataclass(frozen=True)
class Scene:
    """What is known of the two runs.

    Attributes:
        matches: Every tensor of the whole run in its order, and how the split one is related.
        callers: Module name → the module whose code calls it.
        origins: Tensors that one module passes on → where they were first seen.
        layers: Names of modules that hold a weight of two or more dims: what a rule may cut.
        rows: Those of them that are cut along their input features.
        vectors: Names of modules that hold smaller parameters only, as norms do.
    """

    matches: Mapping[Key, Match]
    callers: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[Key, Key] = field(default_factory=dict)
    layers: Collection[str] = ()
    rows: Collection[str] = ()
    vectors: Collection[str] = ()


def in_forward(scene: Scene, raised_in: str | None = None) -> Culprit | None:
    """The module to blame for a forward that differs, or that an exception has ended.

    Args:
        scene: The two runs, up to the exception.
        raised_in: Where it was raised: the innermost module that had not returned.
    """
    order = [key for key in scene.matches if key.side in ("in", "out")]
    first = _first_different(scene, order)
    if first is None:
        return None if raised_in is None else _raised(scene, order, raised_in)
    before = order[: order.index(first)]
    unsummed = _run_of_terms(scene, before)
    if unsummed is not None:
        return Culprit(
            unsummed.module,
            "each rank's output is one term of a sum, and what follows takes it for the whole",
        )
    if first.side == "in":
        owner = scene.callers.get(first.module, "")
        return _own_code(scene, before, owner, f"computes another input for {first.module!r}")
    if _children(scene, first.module):
        return _own_code(scene, before, first.module, "gives another output")
    return Culprit(first.module, "its input is right, its output is not")


def in_backward(scene: Scene, wrong_params: Mapping[str, Sequence[str]]) -> Culprit | None:
    """The module to blame for gradients that differ, the nearest to the loss.

    Args:
        scene: The two runs, with the gradients on both sides of every call.
        wrong_params: Module name → its parameters whose gradients differ.
    """
    order = [key for key in scene.matches if key.side in ("grad_out", "grad_in")]
    last = {key.module: n for n, key in enumerate(order) if key.side == "grad_out"}
    for position, key in enumerate(order):
        relation = scene.matches[key].relation
        if relation == "different":
            unsummed = _run_of_terms(scene, order[:position])
            if unsummed is not None:
                return _unsummed_gradient(scene, unsummed)
            if key.side == "grad_in":
                why = "the gradient of its output is right, that of its input is not"
                return Culprit(key.module, why)
            owner = scene.callers.get(key.module, "")
            return Culprit(owner, f"its code gives {key.module!r} another gradient")
        if last.get(key.module) == position and key.module in wrong_params:
            unsummed = _run_of_terms(scene, order[: position + 1])
            if unsummed is not None and scene.matches[key].relation == "terms":
                return _unsummed_gradient(scene, unsummed)
            return _wrong_param(key.module, wrong_params)
    return next((_wrong_param(name, wrong_params) for name in wrong_params), None)


def _unsummed_gradient(scene: Scene, key: Key) -> Culprit:
    module = key.module if key.side == "grad_in" else scene.callers.get(key.module, "")
    return Culprit(module, "each rank's gradient of its input is one term of a sum nobody takes")


def _wrong_param(module: str, wrong: Mapping[str, Sequence[str]]) -> Culprit:
    names = ", ".join(wrong[module])
    return Culprit(module, f"the gradient of its output is right, that of its {names} is not")


def _first_different(scene: Scene, order: Sequence[Key]) -> Key | None:
    return next((key for key in order if scene.matches[key].relation == "different"), None)


def _run_of_terms(scene: Scene, before: Sequence[Key]) -> Key | None:
    """The first of the terms that nothing has summed up by the end of `before`.

    A tensor of the same size that comes after them and is whole again is taken for their sum.
    """
    first = None
    whole: set[int] = set()
    for key in reversed(before):
        match = scene.matches[key]
        if match.relation == "equal":
            whole.add(match.numel)
        elif match.relation == "terms":
            if match.numel in whole:
                break
            first = key
    return None if first is None else scene.origins.get(first, first)


def _raised(scene: Scene, order: Sequence[Key], module: str) -> Culprit:
    if _children(scene, module):
        return _own_code(scene, order, module, "fails")
    inputs = [k for k in order if k.module == module and k.side == "in"]
    given = next(
        (k for k in reversed(inputs) if scene.matches[k].relation not in ("unknown", "missing")),
        None,
    )
    if given is not None:
        relation = scene.matches[given].relation
        maker = _maker(scene, order, given)
        if relation == "slice" and module in scene.vectors and maker is not None:
            return Culprit(maker, f"its output is left split, but {module!r} needs it whole")
        if relation == "equal" and module in scene.rows and maker is not None:
            return Culprit(maker, f"its output is whole, but {module!r} needs it split")
        if relation == "slice":
            return Culprit(module, "its input arrives split, and it needs it whole")
    return Culprit(module, "it fails on what it is given")


def _maker(scene: Scene, order: Sequence[Key], given: Key) -> str | None:
    """The one layer that has made what a module is given, or None where that is not certain."""
    origin = scene.origins.get(given)
    caller = scene.callers.get(given.module, "")
    if origin is not None and origin.module in scene.layers and origin.side == "out":
        return origin.module
    if origin is not None and scene.callers.get(origin.module) != caller:
        return None
    until = origin if origin in order else given
    before = _sisters(scene, order[: order.index(until)], caller)
    return next(iter(before)) if len(before) == 1 else None


def _own_code(scene: Scene, before: Sequence[Key], module: str, does: str) -> Culprit:
    """Blame for what the code of `module` computes from the results of the layers it calls."""
    relations = _sisters(scene, before, module)
    split = [name for name, relation in relations.items() if relation == "slice"]
    whole = [name for name, relation in relations.items() if relation == "equal"]
    shown = repr(module) if module else "the model itself"
    if split and whole:
        few, many, how = (whole, split, "whole") if len(whole) <= len(split) else (split, whole, "")
        if len(few) == 1:
            return Culprit(
                few[0],
                f"its output is {how or 'split'}, that of {', '.join(map(repr, many))} "
                f"{'split' if how else 'whole'}; {shown} {does}",
            )
    if len(split) == 1 and not whole:
        return Culprit(split[0], f"{shown} {does} with the slice that it leaves on each rank")
    parts = f" from split {', '.join(map(repr, split))}" if split else ""
    return Culprit(module, f"its own code {does}{parts}")


def _sisters(scene: Scene, before: Sequence[Key], caller: str) -> dict[str, str]:
    """The layers that the code of one module has called, and how their outputs are related."""
    return {
        key.module: scene.matches[key].relation
        for key in before
        if key.side == "out"
        and key.module in scene.layers
        and key.module != caller
        and scene.callers.get(key.module) == caller
    }


def _children(scene: Scene, module: str) -> bool:
    return any(caller == module and name != module for name, caller in scene.callers.items())
