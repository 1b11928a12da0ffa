"""FSDP2 around what tensor parallelism has cut: each data rank keeps a chunk of its part.

The mechanics are torch's `fully_shard`; what it is told is decided here and, as data, in
[`plait.plan.shards`][plait.plan.shards].
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from plait import mesh as meshes
from plait import surgery
from plait.build import scalars
from plait.build.axes import data_axis, fsdp_axes
from plait.build.names import names_of
from plait.build.root import expect_calls
from plait.build.unused import agree_on_unused
from plait.build.visits import watch_visits
from plait.errors import PlanError
from plait.layout import ParallelismConfig
from plait.plan import ModelNames
from plait.plan.shards import FREE, ShardGroup, shard_groups
from plait.state import FREES, LAYOUT, state_of
from plait.styles.batch_norm import normalise_over_data
from plait.styles.params import set_param

_BFLOAT16, _FLOAT16 = torch.bfloat16, torch.float16
_DTYPES = {"bf16": _BFLOAT16, "bfloat16": _BFLOAT16, "fp16": _FLOAT16, "float16": _FLOAT16}


def groups_for(module: nn.Module, config: ParallelismConfig) -> list[ShardGroup]:
    """The groups of `module` under a config.

    Raises:
        PlanError: A rule of its `fsdp_plan` cannot be applied.
    """
    names = names_of(module)
    rules = getattr(config, "fsdp_plan", None)
    if rules == "model":
        rules = shipped(module)
    return shard_groups(names, rules if isinstance(rules, Mapping) else None, _ends(module, names))


def shipped(module: nn.Module) -> dict[str, str]:
    """The sharding plan that a model of transformers ships; without rules that match nothing."""
    names = names_of(module)
    base = getattr(getattr(module, "config", None), "base_model_fsdp_plan", None) or {}
    own = getattr(type(module), "_fsdp_plan", None) or {}
    prefix = f"{names.base_prefix}." if names.base_prefix else ""
    rules = {f"{prefix}{pattern}": style for pattern, style in base.items()} | dict(own)
    known = {group.rule for group in _all_matching(names, rules)}
    return {pattern: style for pattern, style in rules.items() if pattern in known}


def _all_matching(names: ModelNames, rules: Mapping[str, str]) -> Iterator[ShardGroup]:
    for pattern, style in rules.items():
        try:
            yield from (g for g in shard_groups(names, {pattern: style}) if g.rule == pattern)
        except PlanError:  # a part that this config does not have, or a tied weight
            continue


def shard(module: nn.Module, mesh: DeviceMesh, config: ParallelismConfig) -> None:
    """Shard a module's parameters over the data axes of a mesh, in place.

    Args:
        module: The module, after tensor parallelism; on meta or with its weights.
        mesh: All axes.
        config: `fsdp_plan`, `fsdp_mixed_precision` and `fsdp_cpu_offload` are read.

    Raises:
        PlanError: A rule cannot be applied, or one module holds parameters of several dtypes.

    Comm: none now. Afterwards, at each group's forward one all-gather of its parameters, in the
        backward another and a reduce-scatter of its gradients, and with copies an all-reduce.
    """
    axes = fsdp_axes(mesh)
    if axes is None:
        return
    # DTensor then adds the parts of a norm in one collective and not axis by axis.
    meshes.flat(mesh, [name for name in mesh.mesh_dim_names or () if name != "dp_replicate"])
    groups = groups_for(module, config)
    named = dict(module.named_modules())
    notes = _notes(module)
    _make_contiguous(module)
    lone = scalars.keep_whole(module, mesh)
    options: dict[str, Any] = {
        "mesh": axes,
        "mp_policy": mixed_precision(getattr(config, "fsdp_mixed_precision", False)),
        "offload_policy": _offload(config, mesh.device_type),
        "ignored_params": set(lone),
    }
    for group in groups:
        part = named[group.name]
        _shard_by_dtype(part, options)
        fully_shard(part, reshard_after_forward=group.style == FREE, **options)
        part.__dict__[FREES] = group.style == FREE
    _shard_by_dtype(module, options)
    fully_shard(module, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule) and mesh.device_type == "cpu":
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    for name, param in module.named_parameters():
        param.__dict__.update(notes[name])
    surgery.watch(module)
    surgery.keep_dtype(module)
    expect_calls(module)
    watch_visits(module, data_axis(mesh))
    agree_on_unused(module, data_axis(mesh))
    scalars.average(module, lone, mesh)
    normalise_over_data(module, data_axis(mesh))


def mixed_precision(asked: bool | str) -> MixedPrecisionPolicy:
    """What `fsdp_mixed_precision` means: compute in bfloat16 (or the dtype named), add in float32.

    Args:
        asked: False, True (bfloat16), or one of "bf16", "bfloat16", "fp16", "float16".
    """
    if not asked:
        return MixedPrecisionPolicy()
    dtype = _BFLOAT16 if asked is True else _DTYPES[asked]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _offload(config: ParallelismConfig, device_type: str) -> OffloadPolicy:
    if not getattr(config, "fsdp_cpu_offload", False):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type == "cuda")


def _ends(module: nn.Module, names: ModelNames) -> list[str]:
    """The embedding and the head, where they are modules of their own that nobody else reads."""
    if not hasattr(module, "get_output_embeddings"):
        return []
    try:
        model: Any = module
        parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return []
    found = [next((n for n, m in module.named_modules() if m is part), "") for part in parts]
    tied = {names.owners[n] for pair in names.tied.items() for n in pair}
    read = {
        f"{owner}.{key.removeprefix('reads.')}" if owner else key.removeprefix("reads.")
        for owner, facts in names.facts.items()
        for key in facts
        if key.startswith("reads.")
    }
    return found if all(n and n not in tied and n not in read for n in found) else []


def _notes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What is recorded on every parameter, and how it lies on the tensor-parallel axis."""
    state = state_of(module)
    layouts = state.layouts if state is not None else {}
    found = {}
    for name, param in module.named_parameters():
        layout = {LAYOUT: layouts[name]} if name in layouts else {}
        found[name] = {**layout, **param.__dict__}
    return found


def _make_contiguous(module: nn.Module) -> None:
    """FSDP sends parameters as they lie in memory."""
    for part in module.modules():
        for name, param in list(part._parameters.items()):
            if param is None:
                continue
            local = param._local_tensor if isinstance(param, DTensor) else param
            if local.is_contiguous():
                continue
            if isinstance(param, DTensor):
                param._local_tensor = local.contiguous()
            else:
                set_param(part, name, param.detach().contiguous(), like=param)


def _shard_by_dtype(part: nn.Module, options: Mapping[str, Any]) -> None:
    """Make groups of the modules whose parameters have another dtype than most of a group's.

    One group has one dtype: norms or routers kept in float32 inside a bfloat16 layer get their own.
    """
    dtypes: Counter[torch.dtype] = Counter()
    owners: list[tuple[nn.Module, set[torch.dtype]]] = []
    for owner in _own_modules(part):
        params = [p for p in owner._parameters.values() if p is not None]
        params = [p for p in params if p.requires_grad and p not in options["ignored_params"]]
        for p in params:
            dtypes[p.dtype] += p.numel()
        if params:
            owners.append((owner, {p.dtype for p in params}))
    if len(dtypes) < 2:
        return
    common = dtypes.most_common(1)[0][0]
    for owner, found in owners:
        if found == {common}:
            continue
        if len(found) > 1 or owner is part:
            raise PlanError(
                f"Sharding {type(part).__name__} over data ranks:",
                f"{type(owner).__name__} holds parameters of several dtypes: "
                f"{', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}",
                ["model.to(one dtype), with fsdp_mixed_precision=True to compute in bfloat16"],
            )
        fully_shard(owner, reshard_after_forward=True, **options)
        owner.__dict__[FREES] = True


def _own_modules(part: nn.Module) -> Iterator[nn.Module]:
    """A module and what is below it, without what is a group already."""
    yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
