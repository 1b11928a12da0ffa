"""Comparing gradients, and finding where the first wrong one comes from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.comm import exchange
from plait.proof import locate, runs
from plait.proof.locate import Culprit, Scene
from plait.proof.match import relate
from plait.proof.numbers import FLOOR, difference, digest, gap_and_scale
from plait.proof.report import Row
from plait.proof.runs import Run
from plait.state import full_grads

if TYPE_CHECKING:
    from plait.proof.comparison import Pair


def compare_gradients(
    pair: "Pair", expected: Run, got: Run, scene: Scene
) -> tuple[list[Row], Culprit | None]:
    """Run the split model's backward and compare the gradients of the two.

    Args:
        pair: The models.
        expected: The whole model's run, with its gradients in its parameters.
        got: The split model's forward, which agrees.
        scene: What is known of the two forwards.

    Returns:
        The rows, from the loss backwards, and the module to blame, if any differs.

    Comm:
        The split model's backward; an all-gather for each split parameter; control messages. Where
        something differs, both models run once more.
    """
    runs.backward(got, pair.dtype, pair.mesh)
    failure = runs.agreed_failure(got.failure, pair.mesh)
    if failure is not None:
        module = _reached(pair)
        row = Row(module, "error", f"backward of {module or 'the model'}", ok=False)
        return [_noted(row, failure.text)], Culprit(module, "its backward fails")
    order = _backward_order(pair.whole, expected)
    rows = [
        *_parameter_rows(pair, order),
        *_embedding_rows(pair, expected, got),
        *_drift_rows(pair, order),
    ]
    wrong: dict[str, list[str]] = {}
    for row in rows:
        if row.ok is False:
            names = wrong.setdefault(row.module, [])
            local = row.name.rpartition(".")[2]
            names += [local] if local not in names else []
    return rows, _diagnose(pair, scene, wrong) if wrong else None


def _noted(row: Row, note: str) -> Row:
    return Row(row.module, row.kind, row.name, ok=row.ok, note=note)


def _backward_order(model: nn.Module, run: Run) -> dict[str, str]:
    """Parameter name → its module, in the order in which a backward finishes them."""
    called = [key.module for key in run.record.tensors if key.side == "in"]
    first = {name: n for n, name in reversed(list(enumerate(called)))}
    owners = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return dict(sorted(owners.items(), key=lambda item: -first.get(item[1], -1)))


def _parameter_rows(pair: "Pair", order: Mapping[str, str]) -> list[Row]:
    params = dict(pair.split.named_parameters())
    mine = {name for name, param in params.items() if param.grad is not None}
    having = exchange(mine, pair.mesh)
    partly = set.union(*having) - set.intersection(*having)
    for name in partly - mine:  # so that all ranks gather the same tensors
        params[name].grad = torch.zeros_like(params[name])
    split = full_grads(pair.split)
    whole = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in pair.whole.named_parameters()
        if x.grad is not None or name in split
    }
    floor = FLOOR * max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
    gaps = exchange(
        {n: difference(split[n], g, floor) for n, g in whole.items() if n in split}, pair.mesh
    )
    rows = []
    for name in (n for n in order if n in whole):
        seen = [rank[name] for rank in gaps if name in rank]
        gap = max(seen) if len(seen) == len(gaps) else None
        scale = max(gap_and_scale(whole[name], whole[name])[1], floor)
        ok = gap is not None and gap <= pair.tolerance
        note = "" if gap is not None else "the split model has none"
        rows.append(Row(order[name], "gradient", name, gap, scale, pair.tolerance, ok, note))
    return rows


def _embedding_rows(pair: "Pair", expected: Run, got: Run) -> list[Row]:
    whole, split = expected.record.embedding_grads, got.record.embedding_grads
    mine = {
        name: difference(split[name], x)
        for name, x in whole.items()
        if name in split and split[name].shape == x.shape
    }
    gaps = exchange(mine, pair.mesh)
    rows = []
    for name, x in whole.items():
        seen = [rank.get(name) for rank in gaps]
        known = [gap for gap in seen if gap is not None]
        gap = max(known) if len(known) == len(seen) else None
        # It may be one term on each rank, before a layer that sums: then the parameters tell.
        same = gap is not None and gap <= pair.tolerance
        scale, what = gap_and_scale(x, x)[1], f"the output of {name}"
        if same:
            rows.append(Row(name, "gradient", what, gap, scale, pair.tolerance))
        else:
            rows.append(Row(name, "gradient", what, ok=None, note="other layout"))
    return rows


def _drift_rows(pair: "Pair", order: Mapping[str, str]) -> list[Row]:
    """Parameters that every rank holds whole, and whose gradients are not the same on all."""
    mine = {}
    for name, param in pair.split.named_parameters():
        grad = param.grad
        if (
            isinstance(grad, DTensor)
            and isinstance(param, DTensor)
            and _is_whole(pair, name, param)
        ):
            mine[name] = digest(grad.to_local())
    seen = exchange(mine, pair.mesh)
    wrong = {n for rank in seen for n in mine if rank.get(n) != mine[n]}
    wrong = set.union(*exchange(wrong, pair.mesh))
    note = "the ranks would drift apart: each has another gradient of the same parameter"
    rows = [Row(order[n], "drift", n, ok=False, note=note) for n in order if n in wrong]
    same = f"{len(mine)} whole parameters have the same gradient on every rank, bit by bit"
    return rows or [Row("", "drift", "drift", note=same)]


def _is_whole(pair: "Pair", name: str, param: DTensor) -> bool:
    layout = pair.layouts.get(name)
    return param.placements[0].is_replicate() and (layout is None or layout.dim is None)


def _diagnose(pair: "Pair", scene: Scene, wrong: Mapping[str, list[str]]) -> Culprit | None:
    """Run both once more with the gradients at every border recorded."""
    expected, got, failed = _tapped(pair)
    simple = locate.in_backward(Scene({}), wrong)
    if failed:
        return simple
    whole, split = expected.record.tensors, got.record.tensors
    grads = {key: x for key, x in whole.items() if key.side in ("grad_out", "grad_in")}
    largest = max((gap_and_scale(x, x)[1] for x in grads.values()), default=0.0)
    matches = relate(
        grads,
        split,
        mesh=pair.mesh,
        tolerance=pair.tolerance,
        pieces=pair.pieces,
        floor=FLOOR * largest,
    )
    seen = replace(scene, matches=matches)
    return locate.in_backward(seen, wrong) or simple


def _tapped(pair: "Pair") -> tuple[Run, Run, bool]:
    kept = [(p, p.grad) for model in (pair.whole, pair.split) for p in model.parameters()]
    expected = runs.forward(pair.whole, pair.batch, pair.dtype, taps=True)
    if expected.failure is None:
        runs.backward(expected, pair.dtype)
    got = runs.forward(pair.split, pair.batch, pair.dtype, taps=True)
    failure = runs.agreed_failure(got.failure, pair.mesh)
    if failure is None:
        runs.backward(got, pair.dtype, pair.mesh)
        failure = runs.agreed_failure(got.failure, pair.mesh)
    for param, grad in kept:
        param.grad = grad
    return expected, got, failure is not None or expected.failure is not None


def _reached(pair: "Pair") -> str:
    """The module whose backward had begun last when the split model's failed."""
    expected, got, _ = _tapped(pair)
    order = [k for k in expected.record.tensors if k.side in ("grad_out", "grad_in")]
    missing = next((n for n, k in enumerate(order) if k not in got.record.tensors), None)
    module = "" if missing is None else order[missing].module
    return exchange(module, pair.mesh)[0]
