"""The command line's entry: verbs, `--version`, and how a failure ends the process."""

from typing import Annotated

import typer

import plait
from plait.cli import chat, check, convert, generate, inspect, train, verify
from plait.cli.options import PARENT_PRINTS

__all__ = ["PARENT_PRINTS", "app", "main"]

app = typer.Typer(
    name="plait",
    help="Run one model on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"plait {plait.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("train")(train.command)
app.command("check")(check.command)
app.command("verify")(verify.command)
app.command("inspect")(inspect.command)
app.command("convert")(convert.command)


def main(mode: str | None = None) -> None:
    """Runs the command line. Exits with 0, 1 after a failure, or 2 after wrong usage.

    Args:
        mode: `PARENT_PRINTS` in a rank whose parent prints the failures.
    """
    app(obj=mode)
