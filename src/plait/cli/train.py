"""`plait train`: fine-tune a model over any layout."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import options, ranks
from plait.errors import CheckpointError, LayoutError
from plait.run import environment

if TYPE_CHECKING:
    from plait.train.loop import Result
    from plait.train.recipe import Recipe

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    model_or_recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe (.yaml); or a directory, GGUF file, or name on the hub.",
            metavar="MODEL_OR_RECIPE",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="File, folder or pattern to learn from. Repeatable."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Directory of the results.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Ranks that share every layer's weights.")
    ] = None,
    dp_shard: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share parameters (FSDP), on other rows.")
    ] = None,
    dp_replicate: Annotated[
        int | None, typer.Option(min=1, help="Copies of all that, on other rows.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows at a time, per data rank.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches in one optimizer step.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")] = None,
    lora_r: Annotated[
        int | None, typer.Option("--lora-r", help="Rank of LoRA adapters, trained instead.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: latest, or its path.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe. Repeatable."),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Fine-tune a language model, or adapters of it, split over N ranks with the batch.

    Starts tp × dp-shard × dp-replicate ranks, or uses those of torchrun. Flags win over the recipe.
    """
    flags = {
        "data.train": data,
        "output": output,
        "layout.tp": tp,
        "layout.dp_shard": dp_shard,
        "layout.dp_replicate": dp_replicate,
        "train.epochs": epochs,
        "train.steps": steps,
        "train.batch_size": batch_size,
        "train.accumulate": accumulate,
        "data.seq_length": seq_length,
        "optimizer.lr": lr,
        "lora.r": lora_r,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    with ranks.reported(debug, ctx.obj == options.PARENT_PRINTS):
        recipe = read_recipe(os.path.expanduser(model_or_recipe), given, settings or [])
        starts_ranks = _starts_ranks(recipe)
        if not environment.world().launched:
            _check_output(recipe, resume)
            _check_model(recipe)
        if starts_ranks:
            _prepare_data(recipe, debug)
            ranks.start(sys.argv[1:], recipe.layout.num_ranks, debug, grace_s=60)
            return
        _run(recipe, resume, debug)


def read_recipe(model_or_recipe: str, flags: dict[str, Any], settings: list[str]) -> "Recipe":
    """The recipe that the command line means.

    Args:
        model_or_recipe: The argument.
        flags: Dotted keys that flags have set.
        settings: `KEY=VALUE` of each `--set`.

    Raises:
        PlaitError: Something in it cannot be.
    """
    from plait.train import recipe as recipes

    base: dict[str, Any] = {"model": model_or_recipe}
    asked = f"plait train {model_or_recipe}:"
    if recipes.is_recipe(model_or_recipe):
        base = recipes.read(Path(model_or_recipe))
        asked = f"The recipe {model_or_recipe}, with what the command line says:"
    over = {**dict(map(recipes.parse_assignment, settings)), **flags}
    return recipes.Recipe.from_dict(recipes.merged(base, over), asked)


def _starts_ranks(recipe: "Recipe") -> bool:
    """Whether ranks are to be started.

    Raises:
        LayoutError: A launcher has started another number than the layout has.
    """
    world, wanted = environment.world(), recipe.layout.num_ranks
    if world.launched and world.world_size != wanted:
        layout = recipe.layout
        raise LayoutError(
            f"plait train under a launcher that started {world.world_size} processes.",
            f"dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × tp {layout.tp} = "
            f"{wanted}, but WORLD_SIZE is {world.world_size}",
            (f"start {wanted} processes", "set the sizes to fit", "drop the launcher"),
        )
    return ranks.needs_ranks(wanted)


def _check_output(recipe: "Recipe", resume: str | None) -> None:
    """Refuses to write one run over another.

    Raises:
        CheckpointError: The output cannot be a directory, or holds a run that is not to be resumed,
            or none.
    """
    from plait.train.recipe import RECIPE

    output = Path(os.path.expanduser(recipe.output))
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is no directory" if not there.is_dir() else "cannot be written to"
        raise CheckpointError(
            f"plait train into {recipe.output}:", f"{there} {why}", "--output another directory"
        )
    holds_run = (output / RECIPE).exists()
    if resume is None and holds_run:
        raise CheckpointError(
            f"plait train into {recipe.output}:",
            "it holds a run already",
            ("--resume latest goes on with it", "--output another directory", "remove it"),
        )
    if resume == "latest" and not (output / "checkpoints").is_dir():
        raise CheckpointError(
            f"plait train --resume latest into {recipe.output}:",
            "there are no checkpoints in it",
            ("leave --resume out", "--output of the run that is to go on"),
        )


def _check_model(recipe: "Recipe") -> None:
    """Refuses a model that looks like a path and isn't there.

    Raises:
        PlaitError: As said.
    """
    path = os.path.expanduser(recipe.model)
    looks_local = path[:1] in "./" or path.endswith(".gguf")
    if looks_local and not Path(path).exists():
        raise LayoutError(
            f"plait train {recipe.model}:",
            "there is no such directory or file",
            ("a directory with config.json and weights", "a .gguf file", "a name on the hub"),
        )


def _prepare_data(recipe: "Recipe", debug: bool) -> None:
    """Makes the tokens before there are ranks that would have to wait for them."""
    _quiet(debug)
    from plait.hf.generation.text import load_tokenizer
    from plait.train import loop_setup

    loop_setup.rows_of(recipe, load_tokenizer(recipe.model))


def _run(recipe: "Recipe", resume: str | None, debug: bool) -> None:
    _quiet(debug)
    from plait.train import loop

    result = loop.train(recipe, resume)
    if environment.world().rank == 0:
        _show(recipe, result)
    if not result.finished:
        raise typer.Exit(INTERRUPTED)


def _quiet(debug: bool) -> None:
    import logging

    logging.getLogger("plait").setLevel(logging.DEBUG if debug else logging.WARNING)
    if not debug:
        from plait.hf.generation import text

        text.silence()


def _show(recipe: "Recipe", result: "Result") -> None:
    if not result.finished:
        print(f"stopped after {result.step} of {result.total_steps} steps: {result.checkpoint}")
        print(f"go on with: plait train {Path(recipe.output, 'recipe.yaml')} --resume latest")
        return
    words = [f"{result.step} steps"]
    if result.last is not None:
        words.append(f"loss {result.last['loss']:.4f}")
    if result.evaluation is not None:
        words.append(f"evaluation loss {result.evaluation['eval_loss']:.4f}")
    print(f"{recipe.output}: {', '.join(words)}")
