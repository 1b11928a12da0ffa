"""What parent and ranks send each other, and how a function is found again on the other side."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What a rank is told once, when it starts."""

    rank: int
    sys_path: tuple[str, ...]
    log_path: str
    stacks_path: str
    typecheck: bool = False
    torch: bool = True


@dataclass(frozen=True)
class Group:
    """The default process group a job runs in.

    Args:
        world_size: Number of ranks; the pool's first `world_size` workers.
        store_path: The file the ranks meet at; a new one for every group.
        backend: torch.distributed backend; None leaves the group to the job and only sets the
            environment that torchrun would set.
        timeout_s: How long a collective of this group waits for its peers.
        extra: Further environment variables.
    """

    world_size: int
    store_path: str
    backend: str | None = "gloo"
    timeout_s: float = 60.0
    extra: tuple[tuple[str, str], ...] = ()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables torchrun sets, for one rank on one host."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            **dict(self.extra),
        }


@dataclass(frozen=True)
class Job:
    """One function to run on every rank of a group.

    Args:
        module: Name of the module the function lives in.
        path: File of that module; imported from there under its own name where it is not
            importable otherwise (test modules are not).
        qualname: The function's qualified name; a method runs on a fresh instance of its class.
        group: The process group to run in.
        local_arguments: Names of arguments that each rank fills in itself.
        wants_value: Whether the return value travels back.
        rewrite_asserts: Whether `assert` in the module explains its operands, as under pytest.
    """

    module: str
    path: str | None
    qualname: str
    group: Group | None
    local_arguments: tuple[str, ...] = ()
    wants_value: bool = False
    rewrite_asserts: bool = False


@dataclass
class Outcome:
    """What one rank has to say about a job.

    `status` is "passed", "failed" or "skipped", from the rank itself, or "died", "hung" or
    "stopped" (still waiting when another rank failed), from the parent on its behalf.
    """

    status: str
    value: Any = None
    text: str = ""
    summary: str = ""
    error: BaseException | None = None
    seconds: float = 0.0
    sequence: int | None = None
    stack: str = field(default="", repr=False)
    output: str = field(default="", repr=False)


def find(job: Job) -> Callable[..., Any]:
    """The function a job names, imported in this process if it is not yet.

    Raises:
        LookupError: The name leads through a function's local scope and cannot be found again.
    """
    module = load(job.module, job.path, job.rewrite_asserts)
    parts = job.qualname.split(".")
    if "<locals>" in parts or "<lambda>" in parts:
        raise LookupError(f"{job.qualname} is local to a function; move it to module level")
    owner: Any = module
    for part in parts[:-1]:
        owner = getattr(owner, part)
        owner = owner() if isinstance(owner, type) else owner
    found: Callable[..., Any] = getattr(owner, parts[-1])
    return found


def load(name: str, path: str | None, rewrite_asserts: bool) -> types.ModuleType:
    """Import module `name` from file `path`, once; a parent's fork may already have it."""
    if name in sys.modules and _is_from(sys.modules[name], path):
        return sys.modules[name]
    if path is None:
        return importlib.import_module(name)
    if "." in name:  # a package gives the module its relative imports
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        code = _rewritten(path) if rewrite_asserts else None
        if code is None:
            spec.loader.exec_module(module)
        else:
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_from(module: types.ModuleType, path: str | None) -> bool:
    file = getattr(module, "__file__", None)
    return path is None or (file is not None and os.path.realpath(file) == os.path.realpath(path))


@functools.cache
def _rewritten(path: str) -> types.CodeType | None:
    """The module's code with pytest's explaining asserts; None where pytest cannot do it."""
    with contextlib.suppress(ImportError, TypeError, SyntaxError):
        from _pytest.assertion.rewrite import rewrite_asserts

        source = Path(path).read_bytes()
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)
    return None
