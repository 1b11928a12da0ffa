"""`plait check`: is a plan right for an architecture? A small copy, whole and split."""

import functools
from typing import Annotated, Any

import typer

from plait.cli import options, proving

DTYPES = ("float64", "float32", "bfloat16")


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    model: proving.Model,
    tp: proving.NumRanks = 2,
    tp_plan: proving.Plan = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Query heads of the copy.", show_default="the model's ratio"),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="Key/value heads of the copy.", show_default="the model's ratio"),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float64",
    enable_sequence_parallel: proving.Sequence = False,
    trust_remote_code: proving.TrustCode = False,
    as_json: proving.AsJson = False,
    debug: options.Debug = False,
    report_to: proving.ReportTo = None,
) -> None:
    """Show that a plan is right for an architecture, on this machine's processor.

    A small copy of the model (same class and structure, random weights) runs whole and split over N
    ranks. Outputs of every module, loss, every gradient and generated tokens are compared. Only the
    config is read. Exit code 0: equal; 1: different, and the first module that differs is named; 2:
    no verdict, such as for a plan that is refused.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is none of {', '.join(DTYPES)}.", param_hint="'--dtype'"
        )
    path = proving.existing(model)
    how = proving.config_for(tp, tp_plan, enable_sequence_parallel)

    def work() -> proving.Verdict:
        proving.quiet(debug)
        return _check(path, how, (heads, kv_heads), dtype, trust_remote_code)

    proving.decide(ctx, tp, report_to, debug=debug, as_json=as_json, work=work)


def _check(
    path: str,
    how: Any,
    heads: tuple[int | None, int | None],
    dtype: str,
    trust: bool,
) -> proving.Verdict:
    import torch

    from plait import build, proof
    from plait.hf import small
    from plait.hf.small.heads import hard_heads

    config = proving.config_of(path, trust)
    _, model_class = proving.class_of(config, path, trust)
    if heads == (None, None):
        heads = hard_heads(config, how.tp_size)
    small_config = small.small_config(config, heads=heads[0], kv_heads=heads[1])
    make = functools.partial(
        small.small_model, model_class, small_config, dtype=getattr(torch, dtype)
    )
    mesh = proving.mesh_of(how.tp_size)
    whole, split = make(), make()
    batch = small.example_batch(whole)
    build.parallelize(split, how, device_mesh=mesh, check=False)
    report = proof.compare(whole, split, batch, mesh=mesh)
    count = sum(p.numel() for p in whole.parameters())
    name = f"{model_class.__name__}, a small copy of {count:,} parameters"
    return proving.verdict_of(name, split, report, mesh)
