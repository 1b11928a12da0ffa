"""The auto classes: transformers' names."""

import os
import warnings
from typing import Any, ClassVar

from plait import build, hf
from plait import mesh as meshes
from plait.auto.reading import randomness_of_first, read_split
from plait.errors import LayoutError, PlaitError
from plait.hf import gguf
from plait.layout import DistributedConfig
from plait.layout.config import refuse_other
from plait.run import process_group


class _Forwarding(type):
    """An auto class has the attributes of transformers' class of the same name too."""

    def __getattr__(cls, name: str) -> Any:
        theirs = cls.__dict__.get("_name")
        if theirs is None or name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return getattr(hf.auto_class(theirs), name)


class _AutoClass(metaclass=_Forwarding):
    """Reads a model of one kind, split over the ranks as `distributed_config` says.

    Class attributes that are not here are those of transformers' class of the same name.
    """

    _name: ClassVar[str]

    @classmethod
    def register(cls, config_class: Any, model_class: Any, exist_ok: bool = False) -> None:
        """Make a model class known for a config class, in transformers and here.

        Args:
            config_class: A subclass of `PreTrainedConfig`.
            model_class: A subclass of `PreTrainedModel` that is made of such a config.
            exist_ok: Replace what was registered for it.
        """
        hf.auto_class(cls._name).register(config_class, model_class, exist_ok=exist_ok)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        distributed_config: DistributedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read a model; every rank reads only the slices that it owns.

        Args:
            pretrained_model_name_or_path: A directory, a GGUF file, or a model's name on the hub.
            *model_args: For an ordinary model only.
            distributed_config: The parallel sizes and rules. None, all sizes 1, or a script that
                no launcher started: an ordinary model of transformers.
            **kwargs: What transformers' `from_pretrained` takes. Where the files come from:
                `revision`, `cache_dir`, `token`, `subfolder`, `local_files_only`, `proxies`,
                `force_download`, `gguf_file`, `variant`, `use_safetensors`, `disable_mmap`. How
                the model is made: `config`, `dtype`, `attn_implementation`,
                `experts_implementation`, `trust_remote_code`, `code_revision`, fields of the
                config. How the weights go into it: `key_mapping`, `ignore_mismatched_sizes`,
                `output_loading_info`. And `generation_config`, `device_mesh`. Quantization,
                adapters, offloading, `state_dict` and kernels are refused for a split model.

        Returns:
            A model of its own transformers class, in evaluation mode; with `output_loading_info`
            and a dict of the missing, unexpected and mismatched tensors.

        Raises:
            LayoutError: The sizes do not fit the processes or the heads, or `device_map` was given
                as well.
            PlanError: The plan cannot be applied. Nothing has been read.
            WeightsError: A file is missing or damaged, or does not hold what the model needs; on
                all ranks, with the rank that found it.
            PlaitError: An argument is unknown, or a split model cannot honour it. Nothing has been
                read.

        Comm:
            A few control messages. No weight travels between ranks.
        """
        path = pretrained_model_name_or_path
        path = path if path is None else os.fspath(path)
        config, kwargs = _distributed_config(distributed_config, kwargs)
        device_mesh = kwargs.pop("device_mesh", None)
        _refuse_device_map(config, kwargs)
        mesh = (
            device_mesh if device_mesh is not None else build.mesh_for(config) if config else None
        )
        if mesh is None:
            return _ordinary(cls._name, path, config, model_args, kwargs)
        assert config is not None or device_mesh is not None
        return read_split(cls._name, _only_path(path, model_args), config, mesh, kwargs)

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
        build.tp_axis(mesh)  # refuses a mesh without one
        device = process_group.ensure(mesh.device_type)
        with randomness_of_first(meshes.flat(mesh), device):
            model = auto_class.from_config(config, **kwargs)
        model.to("cpu" if getattr(plan, "fsdp_cpu_offload", False) else device)
        return build.parallelize(model, plan, device_mesh=mesh)


def _distributed_config(
    config: DistributedConfig | None, kwargs: dict[str, Any]
) -> tuple[DistributedConfig | None, dict[str, Any]]:
    """`config`, or one made of the old `tp_plan` and `tp_size`; and the other arguments."""
    refuse_other(config, "distributed_config")
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


def _only_path(path: str | None, model_args: tuple[Any, ...]) -> str:
    """`path`, where it is there and nothing else came by position."""
    asked = f"from_pretrained({', '.join(map(repr, (path, *model_args)))}) of a split model:"
    if model_args:
        raise PlaitError(
            asked,
            f"{len(model_args)} more positional argument(s), which only the model's class knows",
            ["pass them by name", "tp_size=1 reads with transformers alone"],
        )
    if path is None:
        raise PlaitError(
            asked,
            "each rank reads its slices from files, so there must be some",
            ["give a directory, a GGUF file or a name on the hub", "use from_config"],
        )
    return path


def _ordinary(
    name: str,
    path: str | None,
    config: DistributedConfig | None,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    auto_class = hf.auto_class(name)
    if path is not None and path.endswith(".gguf"):
        folder, file = os.path.split(path)
        kwargs = {**kwargs, "gguf_file": file}
        path = folder or "."
    made = auto_class.from_pretrained(path, *model_args, **kwargs)
    model = made[0] if isinstance(made, tuple) else made
    if "gguf_file" in kwargs:
        gguf.forget_quantizer(model)
    if config is not None:
        model._tp_size = 1
    return made


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
