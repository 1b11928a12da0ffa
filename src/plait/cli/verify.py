"""`plait verify`: is the user's own model, split, the same as whole, on the user's own batch?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import options, proving
from plait.errors import PlaitError


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    model: proving.Model,
    tp: proving.NumRanks = 2,
    tp_plan: proving.Plan = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="A text as the batch.")
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help="JSON or safetensors file of the forward's arguments by name.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(options.DTYPES)}.")] = "float32",
    enable_sequence_parallel: proving.Sequence = False,
    trust_remote_code: proving.TrustCode = False,
    as_json: proving.AsJson = False,
    debug: options.Debug = False,
    report_to: proving.ReportTo = None,
) -> None:
    """Show that a model split over N ranks is the same as whole, with its own weights and a batch.

    Every rank holds the whole model beside its part, both with gradients: 2 + 2/N times the model's
    size, and activations. `plait check` needs no weights. Exit codes as of `plait check`.
    """
    if dtype not in options.DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is none of {', '.join(options.DTYPES)}.", param_hint="'--dtype'"
        )
    if prompt is not None and batch is not None:
        raise typer.BadParameter("give a prompt or a batch, not both.", param_hint="'--batch'")
    path = proving.existing(model)
    how = proving.config_for(tp, tp_plan, enable_sequence_parallel)

    def work() -> proving.Verdict:
        proving.quiet(debug)
        return _verify(path, how, prompt, batch, dtype, trust_remote_code)

    proving.decide(ctx, tp, report_to, debug=debug, as_json=as_json, work=work)


def _verify(
    path: str,
    how: Any,
    prompt: str | None,
    batch: Path | None,
    dtype: str,
    trust: bool,
) -> proving.Verdict:
    import torch

    import plait
    from plait import proof

    mesh = proving.mesh_of(how.tp_size)
    config = proving.config_of(path, trust)
    kind, model_class = proving.class_of(config, path, trust)
    auto_class = getattr(plait, kind)
    arguments: dict[str, Any] = {"trust_remote_code": True} if trust else {}
    arguments["dtype"] = "auto" if dtype == "auto" else getattr(torch, dtype)
    whole = auto_class.from_pretrained(path, **arguments).eval()
    split = auto_class.from_pretrained(
        path, distributed_config=how, device_mesh=mesh, **arguments
    ).eval()
    given = _batch(path, whole, prompt, batch)
    report = proof.compare(whole, split, given, mesh=mesh)
    held = sum(p.numel() * p.element_size() for p in whole.parameters())
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in given.items() if hasattr(x, "shape"))
    name = f"{model_class.__name__} of {held / 1e6:,.1f} MB, whole and split in memory; {shapes}"
    return proving.verdict_of(name, split, report, mesh)


def _batch(path: str, model: Any, prompt: str | None, file: Path | None) -> dict[str, Any]:
    """The forward's arguments: a file's, those of a text, or an example."""
    from plait.hf import small
    from plait.hf.generation import text

    if file is not None:
        return _read_batch(file)
    if prompt is None:
        return small.example_batch(model)
    encoded = text.load_tokenizer(path)(prompt, return_tensors="pt")
    given = {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}
    return {**given, "labels": given["input_ids"].clone()}


def _read_batch(file: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    asked = f"The batch file {file.name}."
    hint = 'a JSON object such as {"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]]}'
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        content = json.loads(file.read_text())
        return {n: torch.tensor(x) if isinstance(x, list) else x for n, x in content.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise PlaitError(asked, f"it is not a mapping of names to tensors: {error}", hint) from None
