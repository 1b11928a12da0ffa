"""Reading a model that is split while it is read."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait import build, comm, hf
from plait import mesh as meshes
from plait.errors import WeightsError
from plait.hf import arguments, gguf, skeleton
from plait.hf import source as sources
from plait.hf.conversion import Conversion, convert
from plait.hf.generation.randomness import borrowed, capture
from plait.layout import DistributedConfig
from plait.run import process_group, progress
from plait.state import ParallelState, local_part, own_class, state_of
from plait.weights import Checkpoint, LoadReport, load, mismatches, together
from plait.weights.sharded import fsdp_part
from plait.weights.slots import placed_like

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prepared:
    """What is known before the first weight is read."""

    source: sources.Source
    checkpoint: Checkpoint
    model: Any
    dtype: torch.dtype
    conversion: Conversion
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def read_split(
    name: str, path: str, config: DistributedConfig | None, mesh: DeviceMesh, kwargs: dict[str, Any]
) -> Any:
    """Steps in the order in which they can be refused: names first, headers next, weights last."""
    tp_mesh, world = build.tp_axis(mesh), meshes.flat(mesh)
    device = process_group.ensure(mesh.device_type)
    watch = progress.Stopwatch()
    ready = together(
        world, f"Reading {path!r}:", lambda: _prepare(name, path, config, tp_mesh, kwargs)
    )
    source, model, conversion = ready.source, ready.model, ready.conversion
    with ready.checkpoint as checkpoint:
        skeleton.untie(model, conversion.untied)
        build.parallelize(model, config, device_mesh=mesh)
        state = state_of(model)
        assert state is not None
        report = _read_weights(model, checkpoint, conversion, state, ready.dtype, device)
    missing = [*conversion.missing, *ready.mismatched]
    _initialise(model, missing, state, device)
    model.config.name_or_path = source.path
    model.__dict__["_weight_conversions"] = list(conversion.transforms)  # undone on saving
    skeleton.load_generation_config(
        model, source.path, source.hub, source.arguments.generation_config
    )
    model.__dict__["_plait_report"] = replace(
        report, seconds=watch.seconds, unexpected=conversion.unexpected
    )
    progress.report(f"{os.path.basename(path)}: {model._plait_report}")
    if source.arguments.output_loading_info:
        return model, _loading_info(model, conversion, ready.mismatched)
    return model


def _prepare(
    name: str,
    path: str,
    config: DistributedConfig | None,
    tp_mesh: DeviceMesh,
    kwargs: dict[str, Any],
) -> _Prepared:
    """Everything that can be refused before a weight is read; no rank talks to another."""
    hub = {n: kwargs[n] for n in arguments.HUB if n in kwargs}
    asked = arguments.sort(path, {n: x for n, x in kwargs.items() if n not in hub})
    auto_class = hf.auto_class(name)
    source = sources.find(auto_class, path, hub, asked)
    dtype = skeleton.choose_dtype(asked.dtype, source.config, lambda: _stored_dtype(source))
    model = skeleton.empty_model(
        auto_class, source.config, dtype, source.model_kwargs, source.model_class
    )
    plan = build.plan_for(model, getattr(config, "tp_plan", None), tp_mesh.size())
    build.check(model, plan, tp_mesh)
    checkpoint = source.open()
    if source.is_gguf:
        conversion = gguf.gguf_conversion(model, checkpoint)
    else:
        conversion = convert(model, checkpoint, asked.key_mapping)
    found = mismatches(model, checkpoint, conversion.recipes)
    if found and not asked.ignore_mismatched_sizes:
        raise WeightsError(
            f"Reading {path!r}:",
            [f"{n}: {a} in the checkpoint, {b} in the module" for n, (a, b) in found.items()],
            ["give the config that fits", "ignore_mismatched_sizes=True initialises them anew"],
        )
    recipes = {n: recipe for n, recipe in conversion.recipes.items() if n not in found}
    return _Prepared(source, checkpoint, model, dtype, replace(conversion, recipes=recipes), found)


def _loading_info(
    model: Any,
    conversion: Conversion,
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> dict[str, Any]:
    """What transformers returns beside the model with `output_loading_info=True`."""
    follow = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        "missing_keys": set(conversion.missing),
        "unexpected_keys": set(conversion.unexpected),
        "mismatched_keys": {
            (n, *shapes) for n, shapes in mismatched.items() if follow.get(n) not in mismatched
        },
        "error_msgs": [],
    }


def _read_weights(
    model: Any,
    checkpoint: Checkpoint,
    conversion: Conversion,
    state: ParallelState,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadReport:
    rule = skeleton.dtype_rule(model, dtype)
    with _bar(checkpoint) as tick:
        return load(
            model,
            checkpoint,
            conversion.recipes,
            state.layouts,
            mesh=meshes.flat(state.mesh),
            rank=state.tp_mesh.get_local_rank(),
            dtype_of=rule,
            device="cpu" if getattr(state.config, "fsdp_cpu_offload", False) else device,
            progress=tick,
        )


@contextmanager
def _bar(checkpoint: Checkpoint) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is told how much has been read so far."""
    with ExitStack() as stack:
        seen: list[Any] = [0, None]

        def tick(done: int, total: int) -> None:
            if seen[1] is None:
                seen[1] = stack.enter_context(progress.bar("Reading weights", total, "B"))
            seen[1](done - seen[0])
            seen[0] = done

        yield tick


def _initialise(model: Any, missing: list[str], state: ParallelState, device: torch.device) -> None:
    """Give tensors that no file holds their initial values, the same on all ranks."""
    rank = state.tp_mesh.get_local_rank()
    placeholders = dict(model.named_parameters(remove_duplicate=False))

    def cut(name: str, whole: torch.Tensor) -> torch.Tensor:
        old = placeholders[name]
        assert isinstance(old, DTensor)
        part = local_part(whole, state.layouts[name], rank)
        return placed_like(old, fsdp_part(part, old).clone())

    with randomness_of_first(meshes.flat(state.mesh), device):
        skeleton.initialise_missing(model, missing, device, cut)
    if missing:
        log.warning(
            "%s: %d tensors are in no file, or in another shape, and were initialised: %s",
            own_class(model).__name__,
            len(missing),
            ", ".join(missing[:8]) + (" …" if len(missing) > 8 else ""),
        )


@contextmanager
def randomness_of_first(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Random numbers of the axis's first rank on all of them, so that all initialise alike."""
    first = mesh.get_local_rank() == 0
    states = comm.exchange(capture(device) if first else None, mesh)[0]
    with borrowed(None if first else states, device):
        yield


def _stored_dtype(source: sources.Source) -> torch.dtype | None:
    with source.open() as checkpoint:
        dtypes = (checkpoint.info(key)[1] for key in checkpoint.keys())  # noqa: SIM118
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)
