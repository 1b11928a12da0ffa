"""Ranks for a command: those that a launcher gave, or its own."""

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from plait import errors
from plait.errors import LayoutError, PlaitError, RankError
from plait.run import environment

_INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of ranks that Ctrl-C has ended, themselves or by their launcher."""


def needs_ranks(tp: int) -> bool:
    """Whether this process must start ranks: more than one is wanted and no launcher gave any.

    Raises:
        LayoutError: A launcher gave another number of processes than `tp`.
    """
    world = environment.world()
    if not world.launched:
        return tp > 1
    if world.world_size != tp:
        raise LayoutError(
            f"--tp {tp} under a launcher that started {world.world_size} processes.",
            f"tp {tp} = {tp}, but WORLD_SIZE is {world.world_size}",
            (f"pass --tp {world.world_size}", f"start {tp} processes", "drop the launcher"),
        )
    return False


def start(arguments: Sequence[str], num_ranks: int, debug: bool = False, grace_s: int = 5) -> None:
    """Runs `plait ARGUMENTS` on `num_ranks` processes of this machine and waits for them.

    torch's elastic launcher starts them, as torchrun does; its rendezvous picks a free port.

    Args:
        arguments: The command line after `plait`.
        num_ranks: Number of processes.
        debug: Show the launcher's own log.
        grace_s: How long the processes have to end after Ctrl-C.

    Raises:
        RankError: A process failed; the message is that of the first one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("", ".agent.server.api", ".multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic{name}").disabled = not debug
    logging.getLogger("torch.distributed").setLevel(logging.INFO if debug else logging.CRITICAL)
    with _threads_shared(num_ranks):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"plait-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="localhost",
            shutdown_timeout=grace_s,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "plait.cli.rank", *arguments)
        except SignalException as error:  # Ctrl-C, once the launcher has ended the ranks
            raise typer.Exit(128 + int(error.sigval)) from None
        except ChildFailedError as error:
            if all(failure.exitcode in _INTERRUPTED for failure in error.failures.values()):
                raise typer.Exit(130) from None
            raise _first_failure(error) from error


@contextlib.contextmanager
def _threads_shared(num_ranks: int) -> Iterator[None]:
    """Divides the processor's cores among the ranks, unless the user has said how many each has."""
    name = "OMP_NUM_THREADS"
    environ = os.environ  # noqa: TID251  (handed to the ranks, which inherit it)
    if name in environ:
        yield
        return
    environ[name] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        yield
    finally:
        environ.pop(name, None)


class _Reported(PlaitError):
    """A message that a rank has left behind; already in words."""


def _first_failure(error: Any) -> PlaitError:
    """The failure that caused the others: the first that isn't about another rank."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    reports = [(rank, _message(failure)) for rank, failure in failures]
    known = [text for _, text in reports if text]
    causes = [text for text in known if not text.startswith("RankError: ")]
    if known:
        return _Reported(_without_name((causes or known)[0]))
    rank, failure = failures[0]
    how = (
        f"was ended by {failure.signal_name()}"
        if failure.exitcode < 0
        else f"ended with exit code {failure.exitcode}"
    )
    return RankError(
        f"plait on {len(error.failures)} or more ranks.",
        f"rank {rank} {how} without a message",
        ("look at its output above", "run again with --debug"),
        rank=rank,
    )


def _message(failure: Any) -> str:
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else ""
    return str(text)


def _without_name(text: str) -> str:
    name, _, message = text.partition(": ")
    return message if name in errors.__dict__ else text


@contextlib.contextmanager
def reported(debug: bool, parent_prints: bool) -> Iterator[None]:
    """Ends the process with exit code 1 and one message when the body fails.

    A rank also leaves the message where its launcher looks for it.

    Args:
        debug: Show the traceback instead.
        parent_prints: This is a rank whose parent, plait itself, prints one message for all.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        try:
            world = environment.world()
        except LayoutError:  # this is what the error is about
            world = environment.World()
        if world.launched:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        if debug:
            traceback.print_exc()
        elif world.rank == 0 and not parent_prints:
            _print(error)
        raise typer.Exit(1) from None


def _print(error: Exception) -> None:
    text = str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
    print(f"plait: {text}", file=sys.stderr)
    if not isinstance(error, PlaitError):
        print("(--debug shows where)", file=sys.stderr)
