"""The command `plait`: one file per verb. Importing it imports neither torch nor transformers."""

from plait.cli.app import main

__all__ = ["main"]
