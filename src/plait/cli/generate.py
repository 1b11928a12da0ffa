"""`plait generate`: text from a model over N ranks."""

import json
import sys
from typing import Annotated, Any

import typer

from plait.cli import options, ranks


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    model: options.ModelPath,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue or answer.")],
    tp: options.TpSize = 1,
    max_new_tokens: options.MaxNewTokens = 128,
    dtype: options.DType = "auto",
    device: options.Device = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat",
            help="Write the prompt in the model's chat format, or not.",
            show_default="if it has one",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print tokens, text and costs as one JSON object.")
    ] = False,
    plan: options.PlanFile = None,
    adapter: options.Adapter = None,
    debug: options.Debug = False,
) -> None:
    """Generate text, with the model split over N ranks.

    Starts its own ranks, or uses those of torchrun. The first rank prints.
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
        _run(chosen, settings, prompt, chat=chat, seed=seed, as_json=as_json)


def _run(
    chosen: options.ModelOptions,
    settings: dict[str, Any],
    prompt: str,
    *,
    chat: bool | None,
    seed: int | None,
    as_json: bool,
) -> None:
    from plait.cli import session as sessions

    session = sessions.open_session(chosen)
    if seed is not None:
        from plait.run import seeds

        seeds.set_all(seed)
    prints = session.rank == 0
    tokens = session.say(
        [{"role": "user", "content": prompt}],
        settings,
        chat,
        _write if prints and not as_json else None,
    )
    costs = session.costs()
    if not prints:
        return
    if as_json:
        result = {"text": session.decode(tokens), "tokens": tokens, "ranks": costs}
        print(json.dumps(result, ensure_ascii=False))
        return
    print(flush=True)
    seconds = costs[0]["generate_s"]
    print(
        f"{len(tokens)} tokens in {seconds:.1f} s on {len(costs)} rank{'s' * (len(costs) > 1)}",
        file=sys.stderr,
    )


def _write(text: str) -> None:
    print(text, end="", flush=True)
