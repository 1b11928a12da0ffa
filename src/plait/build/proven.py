"""Derived rules are proven before they are used: a small copy, whole and split, on these ranks.

For a model of transformers the small copy has the same class and structure. Any other module has no
small copy; it can be proven as it is, with a batch of the user's. Results of small copies are kept,
in this process and in a file, by class, config, rules, number of ranks and versions.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait import proof
from plait.build.rules import Rules
from plait.comm import exchange
from plait.errors import PlanError
from plait.hf.adapt import is_transformers_model
from plait.hf.small.heads import hard_heads
from plait.plan.rules import generalize
from plait.run import environment

Check = bool | Mapping[str, Any]
Split = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Verdict:
    """What a proof has found.

    Attributes:
        wrong: Where split and whole differ, or why that is not known; empty where they are equal.
        unreached: Derived rules, with `*` for every number, of which the proof says nothing.
        is_known: Whether the two were compared at all.
    """

    wrong: str = ""
    unreached: tuple[str, ...] = ()
    is_known: bool = True

    def in_words(self, model: str, check: Check) -> str:
        """What is wrong, in one sentence; empty where the rules are proven."""
        subject = "a small copy" if check is True else model
        if not self.is_known:
            return f"{subject} could not be compared: {self.wrong}"
        if self.wrong:
            return f"{subject} differs, split and whole, first in {self.wrong}"
        if self.unreached:
            return f"the batch does not reach {', '.join(self.unreached)}"
        return ""


_VERDICTS: dict[tuple[type, str], Verdict] = {}
_FORMAT = 2
"""Raised when what a verdict means changes."""


def verdict_on(
    module: nn.Module, rules: Rules, check: Check, mesh: DeviceMesh, split: Split
) -> Verdict:
    """Prove the derived rules of a module, unless that has been done before.

    What is remembered are comparisons of small copies, which the class and the config decide: in
    this process, and in a file for classes of transformers itself. A batch of the user's is always
    run, and a proof that could not be made is tried again.

    Args:
        module: The module, unsplit.
        rules: Its rules.
        check: False: nothing is proven. A batch (keyword arguments of the forward): the module
            itself is run with it. True: a small copy is, for a model of transformers.
        mesh: The axis. All its ranks call this.
        split: Splits a module, or a small copy, by `rules` without a proof.

    Returns:
        The same verdict on every rank.

    Comm:
        Where something is proven, that of `proof.prove`; otherwise at most one control message.
    """
    if check is False or not rules.derived:
        return Verdict()
    if check is not True:
        return _prove(module, rules, check, mesh, split)
    if rules.is_own and _is_in_table(type(module)):
        return Verdict()
    key = _key(module, rules, mesh.size())
    use_file = _is_of_transformers(type(module))
    found = _VERDICTS.get((type(module), key)) or (_read(key) if use_file else None)
    known: Verdict | None = exchange(found, mesh)[0]
    if known is None:
        with _quiet(module):
            known = _prove(module, rules, check, mesh, split)
        if use_file and known.is_known and mesh.get_local_rank() == 0:
            _write(key, known)
    if known.is_known:
        _VERDICTS[type(module), key] = known
    return known


def _prove(
    module: nn.Module, rules: Rules, check: Check, mesh: DeviceMesh, split: Split
) -> Verdict:
    patterns: set[str] = set()

    def work() -> proof.Report:
        make, batch = proof.jointly(lambda: _case(module, check, mesh), mesh, "Making a copy:")

        def noted(copied: nn.Module) -> nn.Module:
            named = [*copied.named_modules(), *copied.named_parameters(remove_duplicate=False)]
            patterns.update(generalize(name) for name, _ in named)
            return split(copied)

        return proof.prove(make, noted, batch, mesh=mesh)

    report, failure = proof.attempt(work, mesh)
    if failure is not None or report is None:
        return Verdict(failure.problems if failure is not None else "no report", (), False)
    if report.no_verdict:
        return Verdict(report.no_verdict, (), False)
    if not report.ok:
        return Verdict(f"{report.first or 'the model itself'}: {report.why}")
    missed = set(report.not_reached)
    derived = dict.fromkeys(generalize(pattern) for pattern in rules.derived)
    unreached = tuple(name for name in derived if name in missed or name not in patterns)
    return Verdict("", exchange(unreached, mesh)[0])


def _case(
    module: nn.Module, check: Check, mesh: DeviceMesh
) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """How to make a copy to be split, and a batch for it."""
    if isinstance(check, Mapping):
        return functools.partial(_double, module), {name: _wide(x) for name, x in check.items()}
    return _small(module, mesh)


def _small(module: nn.Module, mesh: DeviceMesh) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """How to make a small copy, and a batch for it, on the device of the mesh."""
    from plait.hf import small

    if not is_transformers_model(module):
        raise PlanError(
            f"A small copy of {type(module).__name__}:",
            "only models of transformers are made from a config",
            ["check=batch: the module itself is run, whole and split", "check=False"],
        )
    heads, kv_heads = hard_heads(module.config, mesh.size())
    config = small.small_config(module.config, heads=heads, kv_heads=kv_heads)

    def make() -> nn.Module:
        return small.small_model(type(module), config).to(mesh.device_type)

    made = make()
    batch = small.example_batch(made)
    return make, {k: _to(x, mesh.device_type) for k, x in batch.items()}


def _quiet(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    if not is_transformers_model(module):
        return contextlib.nullcontext()
    from plait.hf import small

    return small.quiet()


def _double(module: nn.Module) -> nn.Module:
    """A float64 copy in evaluation mode."""
    if any(p.is_meta for p in module.parameters()):
        raise PlanError(
            f"Running {type(module).__name__} to check a derived plan:",
            "it is on the meta device",
            ["load its weights first", "check=False"],
        )
    return copy.deepcopy(module).double().eval()


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _to(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


@functools.cache
def _table() -> dict[str, Any]:
    """Classes whose derived plans were proven before, and the versions they were proven with."""
    text = resources.files("plait.build").joinpath("proven.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def _is_in_table(kind: type) -> bool:
    if not _is_of_transformers(kind):
        return False
    installed = metadata.version("transformers").split(".")[:2]
    table = _table()
    return table["transformers"].split(".")[:2] == installed and kind.__name__ in table["classes"]


def _is_of_transformers(kind: type) -> bool:
    """Whether its code is that of the installed version, and no model's or user's own."""
    return kind.__module__.startswith("transformers.")


def _key(module: nn.Module, rules: Rules, num_ranks: int) -> str:
    """What decides the outcome of a proof on a small copy."""
    config: Any = module.config if is_transformers_model(module) else None
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    shown = str(module) if config is None else config.to_dict()
    versions = [_FORMAT, metadata.version("plait"), torch.__version__]
    if is_transformers_model(module):
        versions.append(metadata.version("transformers"))
    run = [dict(rules.shipped), dict(rules.derived), num_ranks]
    said = json.dumps([kind, shown, run, versions], default=str, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _file(key: str) -> Path:
    return environment.cache_directory() / "proven" / f"{key}.json"


def _read(key: str) -> Verdict | None:
    try:
        data = json.loads(_file(key).read_text())
        return Verdict(str(data["wrong"]), tuple(map(str, data["unreached"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(key: str, verdict: Verdict) -> None:
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"wrong": verdict.wrong, "unreached": verdict.unreached}))
        scratch.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time only
