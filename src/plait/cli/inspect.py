"""`plait inspect`: what a plan does to a model. No ranks are started and no weights are read."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import inspect_html, inspect_table, options, proving
from plait.plan.explain import Explanation

Picture = Path | None


def command(  # noqa: PLR0913 (an option each)
    model: proving.Model,
    tp: proving.NumRanks = 2,
    tp_plan: proving.Plan = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(options.DTYPES)}.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences, for the collectives.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each, for the collectives.")] = 512,
    html: Annotated[Picture, typer.Option(help="Write a picture: one file for a browser.")] = None,
    png: Annotated[Picture, typer.Option(help="Write a picture.")] = None,
    trust_remote_code: proving.TrustCode = False,
    as_json: proving.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show what splitting a model over N ranks does to it: what is cut, bytes, heads, collectives.

    Only the config is read, and no rank is started. The collectives are those of one training step.
    Exit code 0, or 2 where there is nothing to show, such as for a plan that is refused.
    """
    if dtype not in options.DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is none of {', '.join(options.DTYPES)}.", param_hint="'--dtype'"
        )
    path, rules = proving.existing(model), proving.rules_of(tp_plan)
    for name, file in (("--html", html), ("--png", png)):
        if file is not None and not file.expanduser().absolute().parent.is_dir():
            raise typer.BadParameter(
                f"there is no directory {str(file.parent)!r}.", param_hint=f"'{name}'"
            )
    with proving.no_verdict(debug):
        proving.quiet(debug)
        found = explained(path, tp, rules, dtype, (batch, seq), trust_remote_code)
        if html is not None:
            html.expanduser().write_text(inspect_html.page(found), encoding="utf-8")
        if png is not None:
            from plait.cli import inspect_png

            inspect_png.draw(found, png.expanduser())
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        inspect_table.show(found)


def explained(
    path: str, tp: int, rules: Any, dtype: str, batch: tuple[int, int], trust: bool = False
) -> Explanation:
    """What a plan does to the model of a directory, config file, GGUF file or hub name.

    Args:
        path: Where the model is; only its config is read.
        tp: Number of ranks.
        rules: As `parallelize` takes them.
        dtype: Name of a dtype, or auto.
        batch: Sequences, and tokens of each.
        trust: Whether code that comes with the model may run.

    Raises:
        PlaitError: There is no such model, or the plan is refused.
    """
    from plait import hf
    from plait.build import inspecting
    from plait.hf import skeleton

    config = proving.config_of(path, trust)
    kind, model_class = proving.class_of(config, path, trust)
    chosen = skeleton.choose_dtype(dtype, config, lambda: None)
    module = skeleton.empty_model(hf.auto_class(kind), config, chosen, {}, made_by=model_class)
    inputs = _inputs(module, batch)
    return inspecting.explain(module, rules, tp, inputs=inputs, batch=batch)


def _inputs(module: Any, batch: tuple[int, int]) -> dict[str, Any] | None:
    """An example of the forward's arguments, or None where none can be made."""
    from plait.hf import small

    try:
        return small.example_batch(module, batch=batch[0], length=batch[1])
    except Exception:  # an unusual config: the collectives are then not predicted
        return None
