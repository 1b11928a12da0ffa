"""The auto classes: transformers' names, a model that is split while it is read."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait import build, comm, hf
from plait.errors import LayoutError
from plait.hf import gguf, skeleton
from plait.hf import source as sources
from plait.hf.conversion import Conversion, convert
from plait.hf.generation.randomness import borrowed, capture
from plait.layout import DistributedConfig
from plait.run import process_group, progress
from plait.state import ParallelState, local_part, state_of
from plait.weights import Checkpoint, LoadReport, load, open_checkpoint
from plait.weights.outcome import together

log = logging.getLogger(__name__)


class _AutoClass:
    """Reads a model of one kind, split over the ranks as `distributed_config` says."""

    _name: ClassVar[str]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        distributed_config: DistributedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read a model; every rank reads only the slices that it owns.

        Args:
            pretrained_model_name_or_path: A directory, a GGUF file, or a model's name on the hub.
            distributed_config: The parallel sizes and rules. None, all sizes 1, or a script that
                no launcher started: an ordinary model of transformers.
            **kwargs: What transformers' `from_pretrained` takes: `dtype`, `revision`, `cache_dir`,
                `token`, `subfolder`, `local_files_only`, `trust_remote_code`,
                `attn_implementation`, `generation_config`, `device_mesh`, and fields of the config.

        Returns:
            A model of its own transformers class, in evaluation mode.

        Raises:
            LayoutError: The sizes do not fit the processes or the heads, or `device_map` was given
                as well.
            PlanError: The plan cannot be applied. Nothing has been read.
            WeightsError: A file is missing or damaged, or does not hold what the model needs; on
                all ranks, with the rank that found it.

        Comm:
            A few control messages. No weight travels between ranks.
        """
        path = os.fspath(pretrained_model_name_or_path)
        config, kwargs = _distributed_config(distributed_config, kwargs)
        device_mesh = kwargs.pop("device_mesh", None)
        _refuse_device_map(config, kwargs)
        mesh = (
            device_mesh if device_mesh is not None else build.mesh_for(config) if config else None
        )
        if mesh is None:
            return _ordinary(cls._name, path, config, kwargs)
        assert config is not None or device_mesh is not None
        return _read_split(cls._name, path, config, mesh, kwargs)

    @classmethod
    def from_config(
        cls, config: Any, *, distributed_config: DistributedConfig | None = None, **kwargs: Any
    ) -> Any:
        """Make a model with random weights, the same whole model whatever the number of ranks.

        Args:
            config: A config of transformers.
            distributed_config: As for `from_pretrained`.
            **kwargs: What transformers' `from_config` takes, and `device_mesh`.

        Returns:
            A model of its own transformers class.

        Comm:
            One control message: all ranks use the random numbers of the first.
        """
        plan, kwargs = _distributed_config(distributed_config, kwargs)
        device_mesh = kwargs.pop("device_mesh", None)
        mesh = device_mesh if device_mesh is not None else build.mesh_for(plan) if plan else None
        auto_class = hf.auto_class(cls._name)
        if mesh is None:
            return auto_class.from_config(config, **kwargs)
        tp_mesh = build.tp_axis(mesh)
        device = process_group.ensure(mesh.device_type)
        with _randomness_of_first(tp_mesh, device):
            model = auto_class.from_config(config, **kwargs)
        model.to(device)
        return build.parallelize(model, plan, device_mesh=mesh)


def _distributed_config(
    config: DistributedConfig | None, kwargs: dict[str, Any]
) -> tuple[DistributedConfig | None, dict[str, Any]]:
    """`config`, or one made of the old `tp_plan` and `tp_size`; and the other arguments."""
    kwargs = dict(kwargs)
    old = {name: kwargs.pop(name) for name in ("tp_plan", "tp_size") if name in kwargs}
    old = {name: value for name, value in old.items() if value is not None}
    if not old:
        return config, kwargs
    if config is not None:
        raise LayoutError(
            f"from_pretrained({', '.join(old)}=…, distributed_config=…):",
            "the same thing is given twice",
            "put it into DistributedConfig",
        )
    warnings.warn(
        f"{' and '.join(old)} as an argument of from_pretrained is deprecated: "
        f"pass distributed_config=DistributedConfig({', '.join(f'{n}=…' for n in old)})",
        FutureWarning,
        stacklevel=3,
    )
    return DistributedConfig(**old), kwargs


def _refuse_device_map(config: DistributedConfig | None, kwargs: dict[str, Any]) -> None:
    if config is not None and kwargs.get("device_map") is not None:
        raise LayoutError(
            f"from_pretrained(device_map={kwargs['device_map']!r}, distributed_config=…):",
            "both decide where weights go when they are read",
            ["leave device_map out: each rank uses its own device", "leave distributed_config out"],
        )


def _ordinary(
    name: str, path: str, config: DistributedConfig | None, kwargs: dict[str, Any]
) -> Any:
    auto_class = hf.auto_class(name)
    if path.endswith(".gguf"):
        folder, file = os.path.split(path)
        kwargs = {**kwargs, "gguf_file": file}
        path = folder or "."
    model = auto_class.from_pretrained(path, **kwargs)
    if config is not None:
        model._tp_size = 1
    return model


def _read_split(
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
    with _randomness_of_first(state.tp_mesh, device):
        skeleton.initialise_missing(model, missing, device, cut)
    if missing:
        log.warning(
            "%s: %d tensors are in no file and were initialised: %s",
            type(model).__name__,
            len(missing),
            ", ".join(missing[:8]) + (" …" if len(missing) > 8 else ""),
        )


@contextmanager
def _randomness_of_first(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
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


class AutoModel(_AutoClass):
    """The bare model, without a head."""

    _name = "AutoModel"


class AutoModelForCausalLM(_AutoClass):
    """Language models that continue a text."""

    _name = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLM(_AutoClass):
    """Encoder-decoder language models."""

    _name = "AutoModelForSeq2SeqLM"


class AutoModelForImageTextToText(_AutoClass):
    """Models that read images and text and write text."""

    _name = "AutoModelForImageTextToText"


class AutoModelForSpeechSeq2Seq(_AutoClass):
    """Models that read speech and write text."""

    _name = "AutoModelForSpeechSeq2Seq"


class AutoModelForMaskedLM(_AutoClass):
    """Models that fill in masked tokens."""

    _name = "AutoModelForMaskedLM"


class AutoModelForSequenceClassification(_AutoClass):
    """Models that classify a text."""

    _name = "AutoModelForSequenceClassification"


class AutoModelForTokenClassification(_AutoClass):
    """Models that classify each token."""

    _name = "AutoModelForTokenClassification"


class AutoModelForQuestionAnswering(_AutoClass):
    """Models that find an answer in a text."""

    _name = "AutoModelForQuestionAnswering"
