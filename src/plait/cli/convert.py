"""`plait convert`: a checkpoint of plait into a directory of transformers, and back."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import options, proving, ranks
from plait.errors import PlaitError


def command(  # noqa: PLR0913 (an option each)
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A directory of plait's checkpoints, or a model: directory, GGUF file, hub name.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to write.")],
    dtype: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(options.DTYPES)}; auto keeps each as it is stored."),
    ] = "auto",
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file of transformers, such as 5GB.")
    ] = "50GB",
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Which checkpoint, or the step to give it.", show_default="the latest, or 0"
        ),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER", help="Add an adapter of PEFT to the weights of SRC, a model."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a directory that is not empty.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Turn a checkpoint of plait into a model directory of transformers, or a model into one.

    What SRC is decides; with --merge it is a model, and stays one. One process, one tensor at a
    time: no ranks, and little memory. The model's weights are converted; the optimizer's state
    stays behind.
    """
    if dtype not in options.DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is none of {', '.join(options.DTYPES)}.", param_hint="'--dtype'"
        )
    path = Path(os.path.expanduser(target))
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not force)):
        raise typer.BadParameter(
            f"{str(target)!r} is {'not empty' if path.is_dir() else 'a file'}. Name a directory "
            "that is empty or not there, or pass --force to write into one that has files.",
            param_hint="'DST'",
        )
    with ranks.reported(debug, ctx.obj == options.PARENT_PRINTS):
        proving.quiet(debug)
        found = proving.existing(source)
        if merge is not None:
            print(_merge(found, path, merge, dtype, max_shard_size))
        else:
            print(_convert(found, path, dtype, max_shard_size, step))


def _merge(source: str, target: Path, adapter: str, dtype: str, max_shard_size: str) -> str:
    """Writes a model whose weights hold an adapter; in one process, as PEFT merges it.

    Raises:
        PlaitError: There is no such adapter, or it is not of this model.
    """
    import torch

    from plait.auto import AutoModelForCausalLM
    from plait.checkpoint.to_transformers import is_plait
    from plait.hf.generation.text import load_tokenizer
    from plait.hf.peft.reading import check_adapter, with_adapter

    check_adapter(adapter)
    if is_plait(Path(source)):
        raise PlaitError(
            f"Convert {source} --merge {adapter}:",
            "it is a checkpoint of plait; an adapter is added to a model",
            ["give the model that the adapter was trained on"],
        )
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen)
    merged = with_adapter(model, adapter).merge_and_unload()
    merged.save_pretrained(target, max_shard_size=max_shard_size)
    try:
        load_tokenizer(source).save_pretrained(target)
    except (OSError, ValueError, PlaitError):
        return f"{target}: the model with {adapter}, without a tokenizer"
    return f"{target}: the model with {adapter}"


def _convert(source: str, target: Path, dtype: str, max_shard_size: str, step: int | None) -> str:
    import torch

    from plait import hf
    from plait.checkpoint.from_transformers import from_transformers
    from plait.checkpoint.to_transformers import is_plait, to_transformers
    from plait.weights.saving import byte_count

    size = byte_count(max_shard_size)
    chosen = None if dtype == "auto" else getattr(torch, dtype)
    inside = Path(source) / "checkpoints"
    if is_plait(inside):
        raise PlaitError(
            f"Convert {source}:",
            "it is a run of plait train: a model of transformers already, with checkpoints inside",
            [f"plait convert {inside} {target}: a model of one of the checkpoints"],
        )
    with _bar() as progress:
        if is_plait(Path(source)):
            return str(
                to_transformers(
                    Path(source),
                    target,
                    step=step,
                    dtype=chosen,
                    max_shard_size=size,
                    progress=progress,
                )
            )
        if Path(source).is_dir() and not (Path(source) / "config.json").exists():
            raise PlaitError(
                f"Convert {source}:",
                "it holds neither checkpoints of plait nor a config.json",
                "give the directory that was given to plait.checkpoint.save, or a model's",
            )
        kind, _ = proving.class_of(proving.config_of(source, False), source, False)
        return str(
            from_transformers(
                source,
                target,
                hf.auto_class(kind),
                step=step or 0,
                dtype=chosen,
                progress=progress,
            )
        )


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from plait.run import progress

    with ExitStack() as stack:
        seen: list[Callable[[int], None]] = []
        last = 0

        def tick(done: int, total: int) -> None:
            nonlocal last
            if not seen:
                seen.append(stack.enter_context(progress.bar("Converting", total, "B")))
            seen[0](done - last)
            last = done

        yield tick
