"""A whole model and a split one on the same batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import exchange
from plait.errors import PlaitError
from plait.plan.intervals import ParamLayout, Pieces
from plait.proof import gradients, locate, runs
from plait.proof.locate import Culprit, Scene
from plait.proof.match import Match, relate
from plait.proof.numbers import PER_HEAD, TOLERANCES, digest
from plait.proof.reach import not_reached
from plait.proof.record import Key
from plait.proof.report import Kind, Report, Row
from plait.proof.runs import Failure, Run
from plait.proof.tokens import compare_tokens
from plait.state import full_state_dict, state_of
from plait.styles.linear_kinds import is_conv1d

_NOTES = {
    "slice": "slice",
    "terms": "terms of a sum",
    "unknown": "other layout",
    "missing": "not run",
}
_ORDER = ("equal", "terms", "slice", "unknown", "missing", "different")


def prove(
    make: Callable[[], nn.Module],
    split: Callable[[nn.Module], nn.Module],
    batch: Mapping[str, Any],
    *,
    mesh: DeviceMesh,
    tolerance: float | None = None,
    generate: bool = True,
) -> Report:
    """Make a model twice, split one of the two, and compare them.

    Args:
        make: Makes the model, with the same weights at every call and on every rank.
        split: Splits it, for example `functools.partial(plait.parallelize, device_mesh=mesh)`.
        batch: Keyword arguments of the forward, the same on all ranks.
        mesh: The axis it is split over, a 1-D mesh. All its ranks call this.
        tolerance: As for `compare`.
        generate: As for `compare`.

    Returns:
        The same report on every rank.

    Raises:
        Exception: `make` fails, or `split` refuses.
        PlaitError: As `compare`, or one of the two fails on another rank.

    Comm: as `compare`.
    """
    whole, other = runs.jointly(lambda: (make(), make()), mesh, "Making a model to compare:")
    done = runs.jointly(lambda: split(other), mesh, f"Splitting {type(other).__name__}:")
    return compare(whole, done, batch, mesh=mesh, tolerance=tolerance, generate=generate)


def compare(
    whole: nn.Module,
    split: nn.Module,
    batch: Mapping[str, Any],
    *,
    mesh: DeviceMesh,
    tolerance: float | None = None,
    generate: bool = True,
) -> Report:
    """Run a whole model and a split one on the same batch and compare all that they give.

    Compared are the weights; what every module gives; logits and loss; the gradient of every
    parameter and of what the embeddings give; whether ranks that hold the same parameter get the
    same gradient, bit by bit; and tokens generated greedily. Float64 models run under `exact`.
    Where the output has no `loss`, a fixed random weighting of its tensors serves. Gradients that
    the models hold are cleared.

    Args:
        whole: The model in one process, the same on every rank.
        split: The same model, split.
        batch: Keyword arguments of both forwards, the same on all ranks.
        mesh: The axis it is split over, a 1-D mesh. All its ranks call this.
        tolerance: Largest difference as a fraction of a tensor's largest value; None chooses by
            the dtype of the whole model's parameters.
        generate: Whether to generate tokens too, if the model can.

    Returns:
        The same report on every rank. An exception in the split model's forward, backward or
        `generate` is part of it.

    Raises:
        PlaitError: The whole model cannot run the batch, gives NaN, or is another on each rank, and
            then on all ranks; or the ranks did not meet.

    Comm:
        That of the split model, run up to three times; an all-gather for each split parameter,
        twice; a few control messages.
    """
    dtype = next((p.dtype for p in whole.parameters() if p.is_floating_point()), torch.float32)
    limit = tolerance if tolerance is not None else TOLERANCES.get(dtype, 1e-1)
    pair = Pair(whole, split, batch, mesh, dtype, limit)
    asked = f"Comparing {type(whole).__name__} whole and split:"
    report = runs.jointly(lambda: _compare(pair, generate), mesh, asked)
    return exchange(report, mesh)[0]


@dataclass(frozen=True)
class Pair:
    """The two models and how they are compared; see `compare`."""

    whole: nn.Module
    split: nn.Module
    batch: Mapping[str, Any]
    mesh: DeviceMesh
    dtype: torch.dtype
    tolerance: float

    @property
    def layouts(self) -> Mapping[str, ParamLayout]:
        """Which index ranges of the split model's parameters each rank holds."""
        state = state_of(self.split)
        return state.layouts if state is not None else {}

    @property
    def pieces(self) -> dict[str, Sequence[Pieces]]:
        """Module name → which ranges of its output features each rank gives."""
        found: dict[str, Sequence[Pieces]] = {}
        for name, module in self.whole.named_modules():
            layout = self.layouts.get(f"{name}.weight")
            if layout is not None and layout.dim == (1 if is_conv1d(module) else 0):
                found[name] = layout.pieces
        state = state_of(self.split)
        cuts = state.plan.cuts if state is not None else {}
        return {**found, **{name: cut.need for name, cut in cuts.items()}}


def _compare(pair: Pair, generate: bool) -> Report:
    expected = _run_whole(pair)
    weights = _weight_rows(pair)
    got = runs.forward(pair.split, pair.batch, pair.dtype, taps=False)
    failure = runs.agreed_failure(got.failure, pair.mesh)
    matches = _related(pair, expected, got)
    scene = scene_of(pair, expected, got, matches)
    final = _final_rows(pair, matches) if failure is None else [_error(failure, failure.inside)]
    rows = [*weights, *_output_rows(matches, pair.tolerance), *final]
    culprit: Culprit | None = None
    if any(row.ok is False for row in weights):
        wrong = next(row for row in weights if row.ok is False)
        culprit = Culprit(wrong.module, f"its ranks do not hold the whole of {wrong.name}")
    elif any(row.ok is False for row in final):
        culprit = locate.in_forward(scene, failure.inside if failure is not None else None)
        culprit = culprit or Culprit("", "its outputs differ, though every module's agree")
    else:
        found, culprit = gradients.compare_gradients(pair, expected, got, scene)
        rows += found
    if generate and culprit is None:
        tokens = compare_tokens(pair.whole, pair.split, pair.batch, pair.mesh)
        rows += [tokens] if tokens is not None else []
        if tokens is not None and tokens.ok is False:
            does = f"generate() fails: {tokens.note}" if tokens.name == "error" else ""
            does = does or "it generates other tokens, though forward and backward agree"
            culprit = Culprit("", does)
    rows = _judged(rows, culprit is None)
    first, why = (None, "") if culprit is None else (culprit.module, culprit.why)
    name = str(pair.dtype).removeprefix("torch.")
    state = state_of(pair.split)
    rules = state.plan.rules if state is not None and culprit is None else ()
    missed = not_reached(pair.whole, expected, rules)
    return Report(tuple(rows), first, why, pair.mesh.size(), name, missed)


def _run_whole(pair: Pair) -> Run:
    asked = f"Comparing {type(pair.whole).__name__} whole and split:"

    def work() -> Run:
        run = runs.forward(pair.whole, pair.batch, pair.dtype, taps=False)
        runs.refuse_whole(run, pair.whole)
        runs.backward(run, pair.dtype)
        runs.refuse_whole(run, pair.whole)
        return run

    run = runs.jointly(work, pair.mesh, asked)
    seen = exchange({name: digest(x) for name, x in run.outputs.items()}, pair.mesh)
    other = sorted({n for rank in seen for n in seen[0] if rank.get(n) != seen[0][n]})
    if other:
        raise PlaitError(
            asked,
            f"the whole model gives another {', '.join(other)} on each rank",
            ["make it with the same weights on every rank: set a seed first", "in eval mode"],
        )
    return run


def _related(pair: Pair, expected: Run, got: Run) -> dict[Key, Match]:
    return relate(
        expected.record.tensors,
        got.record.tensors,
        mesh=pair.mesh,
        tolerance=pair.tolerance,
        pieces=pair.pieces,
    )


def scene_of(pair: Pair, expected: Run, got: Run, matches: Mapping[Key, Match]) -> Scene:
    """What is known of the two runs, for finding the module to blame."""
    layers: set[str] = set()
    vectors: set[str] = set()
    rows: set[str] = set()
    for name, module in pair.whole.named_modules():
        dims = [param.ndim for param in module.parameters(recurse=False)]
        if dims:
            (layers if max(dims) > 1 else vectors).add(name)
        layout = pair.layouts.get(f"{name}.weight" if name else "weight")
        into = 0 if is_conv1d(module) else 1
        if layout is not None and len(layout.shape) == 2 and layout.dim == into:
            rows.add(name)
    callers = {**expected.record.callers, **got.record.callers}
    return Scene(matches, callers, got.record.origins, layers, rows, vectors)


def _weight_rows(pair: Pair) -> list[Row]:
    whole, split = pair.whole.state_dict(), full_state_dict(pair.split)
    common = [name for name in whole if name in split]
    mine = [n for n in common if not torch.equal(whole[n].detach().cpu(), split[n])]
    wrong = {name for names in exchange(mine, pair.mesh) for name in names}
    wrong |= whole.keys() ^ split.keys()
    rows = [
        Row(name.rpartition(".")[0], "weights", name, ok=False, note="not those of the whole model")
        for name in [*whole, *(split.keys() - whole.keys())]
        if name in wrong
    ]
    note = f"{len(common)} tensors, each equal"
    return rows or [Row("", "weights", "all parameters", note=note)]


def _output_rows(matches: Mapping[Key, Match], tolerance: float) -> list[Row]:
    """One row a module, in order of execution, for the worst of what it gives."""
    seen: dict[str, list[Match]] = {}
    for key, match in matches.items():
        if key.side == "out" and key.module:
            seen.setdefault(key.module, []).append(match)
    rows = []
    for name, all_of in seen.items():
        worst = max(all_of, key=lambda match: _ORDER.index(match.relation))
        sized = [m for m in all_of if m.relation in ("equal", "slice", "different")]
        largest = max(sized, key=lambda match: match.relative, default=None)
        gap, scale = (None, 0.0) if largest is None else (largest.relative, largest.scale)
        ok = {"different": False, "unknown": None, "missing": None}.get(worst.relation, True)
        note = _NOTES.get(worst.relation, "")
        rows.append(Row(name, "output", name, gap, scale, tolerance, ok, note))
    return rows


def _final_rows(pair: Pair, matches: Mapping[Key, Match]) -> list[Row]:
    rows = []
    for key, match in matches.items():
        if key.module or key.side != "out":
            continue
        kind: Kind = "loss" if key.path == "loss" else "logits"
        ok = match.relation == "equal"
        ok = ok or (match.relation == "slice" and key.path.partition("[")[0] in PER_HEAD)
        note = "" if match.relation == "different" else _NOTES.get(match.relation, "")
        rows.append(Row("", kind, key.path, match.relative, match.scale, pair.tolerance, ok, note))
    return rows


def _error(failure: Failure, module: str) -> Row:
    return Row(module, "error", module or "the model itself", ok=False, note=failure.text)


def _judged(rows: Sequence[Row], same: bool) -> list[Row]:
    """Outputs in between that differ where the results do not are in a layout of their own."""
    if not same:
        return list(rows)
    return [
        replace(row, ok=None, note=_NOTES["unknown"])
        if row.kind == "output" and row.ok is False
        else row
        for row in rows
    ]
