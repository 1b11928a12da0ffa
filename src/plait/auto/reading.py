"""Reading a model that is split while it is read."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait import build, comm, hf
from plait.hf import gguf, skeleton
from plait.hf import source as sources
from plait.hf.conversion import Conversion, convert
from plait.hf.generation.randomness import borrowed, capture
from plait.layout import DistributedConfig
from plait.run import process_group, progress
from plait.state import ParallelState, local_part, state_of
from plait.weights import Checkpoint, LoadReport, load, open_checkpoint, together

log = logging.getLogger(__name__)


def read_split(
    name: str, path: str, config: DistributedConfig | None, mesh: DeviceMesh, kwargs: dict[str, Any]
) -> Any:
    """Steps in the order in which they can be refused: names first, headers next, weights last."""
    hub = {n: kwargs.pop(n) for n in sources.HUB_ARGUMENTS if n in kwargs}
    generation_config = kwargs.pop("generation_config", None)
    tp_mesh = build.tp_axis(mesh)
    device = process_group.ensure(mesh.device_type)
    watch = progress.Stopwatch()

    def prepare() -> tuple[Checkpoint, Any, torch.dtype, Conversion]:
        source = sources.find(path, hub, kwargs)
        dtype = skeleton.choose_dtype(source.dtype, source.config, lambda: _stored_dtype(source))
        model = skeleton.empty_model(hf.auto_class(name), source.config, dtype, source.model_kwargs)
        plan = build.plan_for(model, getattr(config, "tp_plan", None), tp_mesh.size())
        build.check(model, plan, tp_mesh)
        checkpoint = open_checkpoint(source.files(), source.variant)
        if source.is_gguf:
            conversion = gguf.gguf_conversion(model, checkpoint)
        else:
            conversion = convert(model, checkpoint, source.key_mapping)
        return checkpoint, model, dtype, conversion

    checkpoint, model, dtype, conversion = together(tp_mesh, f"Reading {path!r}:", prepare)
    with checkpoint:
        _untie(model, conversion.untied)
        build.parallelize(model, config, device_mesh=mesh)
        state = state_of(model)
        assert state is not None
        report = _read_weights(model, checkpoint, conversion, state, dtype, device)
    _initialise(model, conversion, state, device)
    model.config.name_or_path = path
    model.__dict__["_weight_conversions"] = list(conversion.transforms)  # undone on saving
    skeleton.load_generation_config(model, path, hub, generation_config)
    model.__dict__["_plait_report"] = replace(
        report, seconds=watch.seconds, unexpected=conversion.unexpected
    )
    progress.report(f"{os.path.basename(path)}: {model._plait_report}")
    return model


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
            mesh=state.tp_mesh,
            dtype_of=rule,
            device=device,
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


def _initialise(
    model: Any, conversion: Conversion, state: ParallelState, device: torch.device
) -> None:
    """Give tensors that no file holds their initial values, the same on all ranks."""
    rank = state.tp_mesh.get_local_rank()
    placeholders = dict(model.named_parameters(remove_duplicate=False))

    def cut(name: str, whole: torch.Tensor) -> torch.Tensor:
        old = placeholders[name]
        assert isinstance(old, DTensor)
        x_local = local_part(whole, state.layouts[name], rank)
        return DTensor.from_local(
            x_local,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )

    missing = list(conversion.missing)
    with randomness_of_first(state.tp_mesh, device):
        skeleton.initialise_missing(model, missing, device, cut)
    if missing:
        log.warning(
            "%s: %d tensors are in no file and were initialised: %s",
            type(model).__name__,
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


def _untie(model: Any, names: Sequence[str]) -> None:
    """Give names that the checkpoint stores apart a parameter of their own."""
    for name in names:
        owner, _, local_name = name.rpartition(".")
        module = model.get_submodule(owner)
        tied = module._parameters[local_name]
        module._parameters[local_name] = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
        model.all_tied_weights_keys.pop(name, None)


def _stored_dtype(source: sources.Source) -> torch.dtype | None:
    with open_checkpoint(source.files(), source.variant) as checkpoint:
        dtypes = (checkpoint.info(key)[1] for key in checkpoint.keys())  # noqa: SIM118
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)
