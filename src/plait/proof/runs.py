"""One run of a model: forward, backward, and what went wrong in it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import announcing, exchange, mark_announced
from plait.errors import PlaitError, RankError
from plait.proof.numbers import exact, loss_of, tensors
from plait.proof.record import Record, Recorder
from plait.run import seeds

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception in a run.

    Attributes:
        text: Its class and message, in one line.
        inside: The innermost module that had not returned; `""` is the model itself.
        echo: Whether it only says that another rank has failed, or that the ranks did not meet.
        problems: What stands in the way, without its class and what was asked.
    """

    text: str
    inside: str = ""
    echo: bool = False
    problems: str = ""


@dataclass
class Run:
    """What a model did with a batch.

    Attributes:
        record: What its modules took and gave.
        outputs: Floating-point outputs by name, with their graph.
        failure: What ended it, on this rank.
    """

    record: Record
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    failure: Failure | None = None


def forward(model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype, taps: bool) -> Run:
    """Run the forward of a model, from no gradients and a fixed seed.

    Comm: that of the model's forward.
    """
    model.zero_grad(set_to_none=True)
    with precision(dtype), torch.enable_grad(), Recorder(model, taps) as record:
        run = Run(record)
        try:
            outputs = dict(tensors(model(**batch)))
        except Exception as error:
            run.failure = failure_of(error, record)
        else:
            run.outputs = {n: x for n, x in outputs.items() if x.is_floating_point()}
    return run


def backward(run: Run, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> None:
    """Run the backward of what `forward` has left; a failure is kept in the run.

    Comm: that of the model's backward.
    """
    try:
        with precision(dtype), announcing(mesh) if mesh is not None else contextlib.nullcontext():
            loss = loss_of(run.outputs)
            if loss.requires_grad:
                loss.backward()
    except Exception as error:
        run.failure = failure_of(error, None)


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Fixed random numbers; in float64 nothing is computed in float32."""
    with seeds.borrowed(0), exact() if dtype == torch.float64 else contextlib.nullcontext():
        yield


def failure_of(error: Exception, record: Record | None) -> Failure:
    """An exception in words."""
    said = " ".join([error.asked, *error.problems]) if isinstance(error, PlaitError) else str(error)
    text = f"{type(error).__name__}: {' '.join(said.split())}"[:400]
    problems = "; ".join(error.problems) if isinstance(error, PlaitError) else text
    inside = record.inside[-1] if record is not None and record.inside else ""
    echo = isinstance(error, (RankError, TimeoutError, torch.distributed.DistError))
    return Failure(text, inside, echo, problems or text)


def agreed_failure(failure: Failure | None, mesh: DeviceMesh) -> Failure | None:
    """The failure that has caused those of all ranks, or None where none has failed.

    Comm:
        One exchange of a control message, and one more on ranks that hear of another's failure only
        here.
    """
    try:
        failures = exchange(failure, mesh)
    except RankError as error:
        failures = exchange(failure or failure_of(error, None), mesh)
    real = [f for f in failures if f is not None]
    return next((f for f in real if not f.echo), real[0] if real else None)


def attempt(work: Callable[[], T], mesh: DeviceMesh) -> tuple[T | None, Failure | None]:
    """Do something on every rank; where it fails on one, all know.

    Comm: that of `work`, and `agreed_failure`.
    """
    result, failure = None, None
    try:
        with announcing(mesh):
            result = work()
    except Exception as error:
        failure = failure_of(error, None)
    return result, agreed_failure(failure, mesh)


def jointly(work: Callable[[], T], mesh: DeviceMesh, asked: str) -> T:
    """Do something on every rank; where it fails on one, all raise.

    Args:
        work: What to do; it may communicate.
        mesh: The axis.
        asked: What is being done, for the message on ranks where it succeeded.

    Raises:
        Exception: This rank's own failure, as it was raised.
        RankError: Another rank's.

    Comm: that of `work`, and `agreed_failure`.
    """
    failures: list[Exception] = []
    results: list[T] = []
    try:
        with announcing(mesh):
            results.append(work())
    except Exception as error:
        failures.append(mark_announced(error))
    agreed = agreed_failure(failure_of(failures[0], None) if failures else None, mesh)
    if failures:
        raise failures[0]
    if agreed is not None:
        raise mark_announced(RankError(asked, f"another rank failed: {agreed.text}"))
    return results[0]


def refuse_whole(run: Run, model: nn.Module) -> None:
    """Refuse a batch that the whole model cannot run, or that gives no numbers.

    Raises:
        PlaitError: It is one.
    """
    asked = f"Comparing {type(model).__name__} whole and split:"
    if run.failure is not None:
        raise PlaitError(
            asked,
            f"the whole model cannot run the batch: {run.failure.text}",
            "give a batch of keyword arguments that model(**batch) takes",
        )
    if not run.outputs:
        raise PlaitError(asked, "its output holds no floating-point tensor", ())
    empty = [n for n, x in run.outputs.items() if bool(torch.isnan(x).any())]
    if empty:
        raise PlaitError(
            asked,
            f"the whole model gives NaN in {', '.join(empty)}, which nothing can be compared with",
            ["give another batch", "another dtype"],
        )
