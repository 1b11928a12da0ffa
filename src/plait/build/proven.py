"""Derived rules are proven before they are used: a small copy, whole and split, on these ranks.

For a model of transformers the small copy has the same class and structure. Any other module has no
small copy; it can be proven as it is, with a batch of the user's. Results are kept, in this process
and in a file, by class, config, rules and versions.
"""

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait import proof
from plait.build.rules import Rules
from plait.comm import exchange
from plait.errors import PlaitError, PlanError
from plait.hf.adapt import is_transformers_model
from plait.run import environment

Check = bool | Mapping[str, Any]
Split = Callable[[nn.Module], nn.Module]

_VERDICTS: dict[str, str] = {}


def why_unproven(
    module: nn.Module, rules: Rules, check: Check, mesh: DeviceMesh, split: Split
) -> str:
    """Prove the derived rules of a module, unless that has been done before.

    Args:
        module: The module, unsplit.
        rules: Its rules.
        check: False: nothing is proven. A batch (keyword arguments of the forward): the module
            itself is run with it. True: a small copy is, for a model of transformers.
        mesh: The axis. All its ranks call this.
        split: Splits a module by derived rules without a proof.

    Returns:
        What is wrong, in one sentence; empty where the rules are right, or nothing is to be proven.

    Comm:
        Where something is proven, that of `proof.prove`; otherwise one control message.
    """
    if check is False or not rules.derived:
        return ""
    if check is True and is_transformers_model(module) and _is_in_table(type(module).__name__):
        return ""
    key = _key(module, rules, mesh.size())
    use_file = check is True
    known = exchange(_VERDICTS.get(key, _read(key) if use_file else None), mesh)[0]
    if known is None:
        with _quiet(module):
            known = _prove(module, check, mesh, split)
        if use_file and mesh.get_local_rank() == 0:
            _write(key, known)
    _VERDICTS[key] = known
    return known


def _prove(module: nn.Module, check: Check, mesh: DeviceMesh, split: Split) -> str:
    try:
        if isinstance(check, Mapping):
            make: Callable[[], nn.Module] = functools.partial(_double, module)
            batch = {name: _wide(x) for name, x in check.items()}
        else:
            make, batch = _small(module, mesh)
    except Exception as error:  # whatever a model's code does with a small config
        return f"a small copy could not be made: {_line(error)}"
    try:
        report = proof.prove(make, split, batch, mesh=mesh)
    except PlaitError as error:
        return f"a small copy could not be compared: {_line(error)}"
    if report.ok:
        return ""
    return f"split and whole differ, first in {report.first or 'the model itself'}: {report.why}"


def _small(module: nn.Module, mesh: DeviceMesh) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """How to make a small copy, and a batch for it, on the device of the mesh."""
    from plait.hf import small

    if not is_transformers_model(module):
        raise PlanError(
            f"A small copy of {type(module).__name__}:",
            "only models of transformers are made from a config",
            ["check=batch: the module itself is run, whole and split", "check=False"],
        )
    heads = _heads_for(mesh.size(), module)
    config = small.small_config(module.config, **heads)

    def make() -> nn.Module:
        return small.small_model(type(module), config).to(mesh.device_type)

    made = make()
    batch = small.example_batch(made)
    return make, {k: _to(x, mesh.device_type) for k, x in batch.items()}


def _heads_for(num_ranks: int, module: nn.Module) -> dict[str, int]:
    """Head counts of a small copy that can be split over so many ranks; none where it can be."""
    if num_ranks <= 4:
        return {}
    config: Any = module.config
    text = config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or num_ranks)
    kv = int(getattr(text, "num_key_value_heads", 0) or heads)
    group = max(1, heads // kv)
    return {"heads": -(-num_ranks // group) * group, "kv_heads": -(-num_ranks // group)}


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


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@functools.cache
def _table() -> dict[str, Any]:
    """Classes whose derived plans were proven before, and the versions they were proven with."""
    text = resources.files("plait.build").joinpath("proven.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def _is_in_table(class_name: str) -> bool:
    installed = metadata.version("transformers").split(".")[:2]
    table = _table()
    return table["transformers"].split(".")[:2] == installed and class_name in table["classes"]


def _key(module: nn.Module, rules: Rules, num_ranks: int) -> str:
    config: Any = module.config if is_transformers_model(module) else None
    shown = str(module) if config is None else config.to_dict()
    versions = [metadata.version(name) for name in ("plait", "torch")]
    if is_transformers_model(module):
        versions.append(metadata.version("transformers"))
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    said = json.dumps([kind, shown, rules.merged, num_ranks, versions], default=str, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _file(key: str) -> Path:
    return environment.cache_directory() / "proven" / key


def _read(key: str) -> str | None:
    try:
        return _file(key).read_text()
    except OSError:
        return None


def _write(key: str, verdict: str) -> None:
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(verdict)
        scratch.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time only
