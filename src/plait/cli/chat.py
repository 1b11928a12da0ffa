"""`plait chat`: a conversation with a model over N ranks."""

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from plait.cli import options, ranks

_HEARTBEAT_S = 10.0
_QUIT = ("/quit", "/exit", "/bye")


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    model: options.ModelPath,
    tp: options.TpSize = 1,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    dtype: options.DType = "auto",
    device: options.Device = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    plan: options.PlanFile = None,
    adapter: options.Adapter = None,
    debug: options.Debug = False,
) -> None:
    """Talk to a model that is split over N ranks. /new starts over, /quit or Ctrl-D ends.

    Starts its own ranks, or uses those of torchrun. The first rank reads and prints.
    """
    chosen = options.ModelOptions(model, tp, dtype, device, plan, debug, adapter)
    sampling = options.SamplingOptions(temperature, top_k, top_p, seed)
    chosen.check()
    sampling.check()
    with ranks.reported(debug, ctx.obj == options.PARENT_PRINTS):
        chosen.check_adapter()
        if ranks.needs_ranks(tp):
            ranks.start(sys.argv[1:], tp, debug)
            return
        settings = {**sampling.settings(), "max_new_tokens": max_new_tokens}
        _talk(chosen, settings, system, seed)


def _talk(
    chosen: options.ModelOptions, settings: dict[str, Any], system: str | None, seed: int | None
) -> None:
    from plait.cli import session as sessions

    session = sessions.open_session(chosen)
    if seed is not None:
        from plait.run import seeds

        seeds.set_all(seed)
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    prints = session.rank == 0
    for line in _lines(session):
        if line == "/new":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": line})
        tokens = session.say(messages, settings, None, _write if prints else None)
        messages.append({"role": "assistant", "content": session.decode(tokens)})
        if prints:
            print(flush=True)


def _lines(session: Any) -> Iterator[str]:
    """The user's lines, read by rank 0 and given to all ranks.

    The others must not wait longer than a collective may, so rank 0 says every few seconds that
    it is still waiting.
    """
    inbox: queue.Queue[str | None] = queue.Queue()
    wanted = threading.Event()
    if session.rank == 0:
        threading.Thread(target=_read, args=(inbox, wanted), daemon=True).start()
    wanted.set()
    while True:
        line: str | None = ""
        if session.rank == 0:
            try:
                line = inbox.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                line = ""
        line = session.share(line)[0]
        if line is None or line in _QUIT:
            return
        if line:
            yield line
            wanted.set()


def _read(inbox: "queue.Queue[str | None]", wanted: threading.Event) -> None:
    """Puts the lines of standard input into `inbox`, one at a time, then `None`."""
    while True:
        wanted.wait()
        wanted.clear()
        line = ""
        while not line:
            if sys.stdin.isatty():
                print("> ", end="", flush=True)
            text = sys.stdin.readline()
            if not text:
                inbox.put(None)
                return
            line = text.strip()
        inbox.put(line)


def _write(text: str) -> None:
    print(text, end="", flush=True)
