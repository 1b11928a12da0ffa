"""The auto classes: transformers' names."""

import os
import warnings
from typing import Any, ClassVar

from plait import build, hf
from plait.auto.reading import randomness_of_first, read_split
from plait.errors import LayoutError
from plait.layout import DistributedConfig
from plait.run import process_group


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
        return read_split(cls._name, path, config, mesh, kwargs)

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
        with randomness_of_first(tp_mesh, device):
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
