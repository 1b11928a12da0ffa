"""Which checkpoint is meant, and whether its files are sound."""

from pathlib import Path

from plait.checkpoint import folders, manifest
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.ranks import Place, place_of
from plait.errors import CheckpointError

_SHOWN = 12


def open_checkpoint(asked: str, directory: Path, step: int | None) -> tuple[Path, Manifest]:
    """One checkpoint, all of it checked by this process alone.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    folder = choose(asked, directory, step)
    stored = sound(asked, folder)
    check_content(asked, folder, stored, place_of(None))
    return folder, stored


def choose(asked: str, directory: Path, step: int | None) -> Path:
    """The folder that is meant.

    Args:
        asked: For the message.
        directory: As given to `save`, or one checkpoint in it.
        step: Which; the latest by default.

    Raises:
        CheckpointError: There is none; those that are there are named.
    """
    if step is None and (directory / manifest.NAME).exists():
        return directory
    found = folders.committed(directory)
    if step is not None:
        found = [folder for folder in found if folders.step_of(folder) == step]
    if found:
        return found[-1]
    have = sorted({folders.step_of(folder) for folder in folders.committed(directory)})
    problem = f"there is no checkpoint of step {step}" if step is not None else "none is there"
    ways = [f"step={have[-1]}, of {', '.join(map(str, have[-5:]))} that are there"] if have else []
    raise CheckpointError(asked, problem, ways)


def sound(asked: str, folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are there, in their sizes.

    Raises:
        CheckpointError: It is damaged; the one before it is offered.
    """
    try:
        stored = manifest.read(folder)
        problems = manifest.wrong_sizes(folder, stored)
    except CheckpointError as error:
        stored, problems = None, list(error.problems)
    if stored is None or problems:
        raise _damaged(asked, folder, problems)
    return stored


def _damaged(asked: str, folder: Path, problems: list[str]) -> CheckpointError:
    """The error of a checkpoint that cannot be used, with the one before it where that can."""
    ways = []
    before = folders.committed(folder.parent)
    if folder in before:
        before = before[: before.index(folder)]
    for other in reversed(before):
        try:
            if not manifest.wrong_sizes(other, manifest.read(other)):
                ways.append(f"step={folders.step_of(other)}: {other.name} is complete")
                break
        except CheckpointError:
            continue
    named = [f"{folder.name}: {problem}" for problem in problems]
    ways.append("delete the damaged folder: the latest of the others is taken then")
    return CheckpointError(asked, first(named), ways)


def check_content(asked: str, folder: Path, stored: Manifest, place: Place) -> None:
    """Compares checksums: every rank those of its share of the files.

    Raises:
        CheckpointError: A file is damaged.
    """
    names = sorted(stored.files, key=lambda name: -stored.files[name].nbytes)
    problems = manifest.wrong_content(folder, stored, names[place.index :: place.num_ranks])
    if problems:
        raise _damaged(asked, folder, problems)


def first(problems: list[str]) -> list[str]:
    """The first of many problems, and how many more there are."""
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return problems[:_SHOWN] + more
