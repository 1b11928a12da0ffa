"""The directory of a run: one folder for each checkpoint, which appears when it is complete.

Which came last is told by a counter in each folder, not by the step: a run may go back to an
earlier step and save again. Folders without one, of earlier versions, come first, by step.

step-00000010                      a checkpoint
step-00000010-2                    the same step, saved once more
step-00000020.partial-1f0c…        is being written, or was when its run was killed
step-00000000.removing-93ab…       is being deleted
"""

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from plait.errors import CheckpointError
from plait.weights.loading import human_bytes

ORDER = "order"
"""The file in a checkpoint that says how many were committed up to it."""

_COMMITTED = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_LEFTOVER = re.compile(r"step-\d{8,}(?:-\d+)?\.(?:partial|removing)-[0-9a-f]+")


def committed(directory: Path) -> list[Path]:
    """The checkpoints in a directory, in the order in which they were committed."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_count(path), *_order(path)))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was committed last in a directory, or None.

    That is the newest save, also where the run had gone back to an earlier step.

    One that is being written, or was when its run was killed, is not seen. Whether the files are
    sound is looked at by `load`.

    Args:
        directory: As given to `save`.

    Comm: none.
    """
    found = committed(Path(directory))
    return found[-1] if found else None


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says."""
    return _order(folder)[0]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is named as one checkpoint is."""
    return _COMMITTED.fullmatch(path.name) is not None


def next_count(directory: Path) -> int:
    """What the next checkpoint to be committed writes into its file `order`."""
    return max((_count(path) for path in committed(directory)), default=0) + 1


def new_folders(directory: Path, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of a step is written, and where it goes when it is complete."""
    same = [_order(path)[1] for path in committed(directory) if _order(path)[0] == step]
    again = f"-{max(same) + 1}" if same else ""
    name = f"step-{step:08d}{again}"
    return directory / f"{name}.partial-{secrets.token_hex(6)}", directory / name


def begin(asked: str, directory: Path, step: int | None, needed: int) -> tuple[Path, Path]:
    """Makes the folder that a checkpoint is written to, and deletes what killed runs have left.

    Args:
        asked: For messages.
        directory: The run's.
        step: The step; by default one more than that of the latest checkpoint.
        needed: Bytes that it will take.

    Returns:
        That folder, and what it becomes.

    Raises:
        CheckpointError: The directory cannot be written, or the disk is too small.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clean(directory)
        if step is None:
            last = latest(directory)
            step = 0 if last is None else step_of(last) + 1
        partial, final = new_folders(directory, step)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise CheckpointError(
                asked,
                f"it takes {human_bytes(needed)}, the disk has {human_bytes(free)}",
                ["keep fewer checkpoints (keep=1)", "give another directory"],
            )
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(asked, f"the directory cannot be written: {error}") from error
    return partial, final


def commit(partial: Path, final: Path) -> None:
    """Makes a complete checkpoint appear under its name, and stay there after a power cut."""
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def clean(directory: Path) -> None:
    """Deletes what killed runs have left."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def prune(directory: Path, newest: Path, keep: int | None) -> None:
    """Deletes all but those that were committed last, and never `newest`.

    Args:
        directory: Where they are.
        newest: The one that was committed last; checkpoints of the same step are replaced by it.
        keep: How many stay; None: all of other steps.
    """
    found = committed(directory)
    old = [path for path in found if step_of(path) == step_of(newest) and path != newest]
    rest = [path for path in found if path not in old]
    if keep is not None:
        old += [path for path in rest[:-keep] if path != newest]
    for path in old:
        gone = path.with_name(f"{path.name}.removing-{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):  # the next save cleans up
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def sync(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _count(folder: Path) -> int:
    """How many checkpoints had been committed with this one; 0 where the folder does not say."""
    try:
        return max(int((folder / ORDER).read_text()), 0)
    except (OSError, ValueError):  # of an earlier version, deleted meanwhile, or damaged
        return 0


def _order(folder: Path) -> tuple[int, int]:
    found = _COMMITTED.fullmatch(folder.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)
