"""The arguments of `from_pretrained`: what plait honours, what it refuses, and what nobody knows.

Written against `PreTrainedModel.from_pretrained` of transformers 5.23. No argument passes in
silence: each is honoured, or named in an error before a weight is read.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.errors import PlaitError

HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Arguments that say where files come from."""

OBSOLETE = (
    "_commit_hash",
    "_fast_init",
    "_from_auto",
    "_from_pipeline",
    "from_flax",
    "from_tf",
    "low_cpu_mem_usage",
    "mirror",
    "offload_state_dict",
)
"""Arguments that decide nothing, in transformers as here."""

_PLACES = (
    "each rank keeps the slices it owns on its own device",
    "leave it out: `tp_size` decides how much each rank holds",
)
_QUANTIZED = (
    "splitting quantized weights is not supported yet",
    "leave it out: the weights are read as they are stored",
)
_KERNELS = (
    "kernels that replace whole layers do not know that the layers are split",
    "leave it out; `attn_implementation` and `experts_implementation` are honoured",
)
_ADAPTERS = (
    "adapters are not read into a split model yet",
    "merge the adapter into the model, save that, and read it from there",
)
REFUSED = {
    "adapter_kwargs": _ADAPTERS,
    "adapter_name": _ADAPTERS,
    "allow_all_kernels": _KERNELS,
    "device_map": _PLACES,
    "fusion_config": _KERNELS,
    "kernel_config": _KERNELS,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "max_memory": _PLACES,
    "offload_buffers": _PLACES,
    "offload_folder": _PLACES,
    "quantization_config": _QUANTIZED,
    "state_dict": (
        "each rank reads its slices from files",
        "make the model with from_config, load the state dict, then plait.parallelize(model)",
    ),
    "tqdm_class": ("plait shows progress in its own way", "leave it out"),
    "use_kernels": _KERNELS,
    "weights_only": (
        "a file that was pickled is read for its tensors only, whatever it holds",
        "leave it out, or save the weights as safetensors",
    ),
}
"""Arguments of transformers that a split model cannot honour: why, and the way out. Their defaults
(None, False, empty) are accepted."""

_HARMLESS = {"adapter_name": "default", "weights_only": True}

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")

_HONOURED = (
    "code_revision",
    "config",
    "device_mesh",
    "disable_mmap",
    "distributed_config",
    "dtype",
    "generation_config",
    "gguf_file",
    "ignore_mismatched_sizes",
    "key_mapping",
    "output_loading_info",
    "torch_dtype",
    "trust_remote_code",
    "use_safetensors",
    "variant",
    *_IMPLEMENTATIONS,
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one `from_pretrained`, sorted.

    Attributes:
        config: A config of transformers, where to read one, or None.
        dtype: A dtype, its name, `"auto"` or None.
        gguf_file: The name of a GGUF file in the directory or repository.
        variant: The variant of the weight files (`"fp16"`).
        use_safetensors: True: only safetensors files; False: only files that `torch.save` wrote.
        disable_mmap: Read files into memory instead of mapping them.
        key_mapping: Renamings of checkpoint names, applied first.
        ignore_mismatched_sizes: Initialise tensors whose shape in the file is another.
        output_loading_info: Return what was missing, unexpected and mismatched too.
        generation_config: To use instead of the saved one.
        trust_remote_code: Run the code that comes with the model.
        code_revision: The revision of that code.
        implementations: `attn_implementation`, `experts_implementation`, where given.
        fields: The others: fields of the config, or what the model's class takes.
    """

    config: Any = None
    dtype: Any = None
    gguf_file: str | None = None
    variant: str | None = None
    use_safetensors: bool | None = None
    disable_mmap: bool | None = None
    key_mapping: Mapping[str, str] | None = None
    ignore_mismatched_sizes: bool = False
    output_loading_info: bool = False
    generation_config: Any = None
    trust_remote_code: bool | None = None
    code_revision: str | None = None
    implementations: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


def sort(path: str, kwargs: Mapping[str, Any]) -> Arguments:
    """Sort the arguments of `from_pretrained`, those of `HUB` left out.

    Args:
        path: What is to be read, for messages.
        kwargs: The arguments.

    Raises:
        PlaitError: An argument asks for what a split model cannot do; all of them are named.
    """
    rest = {name: value for name, value in kwargs.items() if name not in OBSOLETE}
    refused = {n: rest.pop(n) for n in REFUSED if n in rest}
    refused = {n: x for n, x in refused.items() if not _means_nothing(n, x)}
    if refused:
        ways = list(dict.fromkeys(REFUSED[name][1] for name in refused))
        raise PlaitError(
            f"from_pretrained({path!r}, {', '.join(f'{name}=…' for name in refused)}) of a split "
            "model:",
            [f"{name}: {REFUSED[name][0]}" for name in refused],
            [*ways[:2], "tp_size=1 reads with transformers alone"],
        )
    old = rest.pop("torch_dtype", None)
    implementations = {n: x for n in _IMPLEMENTATIONS if (x := rest.pop(n, None)) is not None}
    dtype = rest.pop("dtype", None)
    own = set(Arguments.__dataclass_fields__) - {"dtype", "fields", "implementations"}
    known = {name: rest.pop(name) for name in own if name in rest}
    return Arguments(
        **known,
        dtype=old if dtype is None else dtype,
        implementations=implementations,
        fields=rest,
    )


def _means_nothing(name: str, value: Any) -> bool:
    if value is None or (value is False and name != "weights_only"):
        return True
    if isinstance(value, Mapping | str) and not value:
        return True
    return name in _HARMLESS and bool(value == _HARMLESS[name])


def refuse_for_gguf(path: str, arguments: Arguments) -> None:
    """Refuse what has no meaning for a GGUF file.

    Raises:
        PlaitError: Such arguments were given; all of them are named.
    """
    given = [name for name in ("variant", "key_mapping") if getattr(arguments, name)]
    given += ["use_safetensors"] if arguments.use_safetensors else []
    if given:
        raise PlaitError(
            f"from_pretrained({path!r}, {', '.join(f'{name}=…' for name in given)}):",
            [f"{name} has no meaning for a GGUF file" for name in given],
            ["leave it out", "give a directory with safetensors files"],
        )


def taken_by(model_class: Any, names: Iterable[str]) -> set[str]:
    """Which of some argument names the making of a model takes beside its config.

    A class of transformers that takes any keyword drops those it does not know, so there only the
    names in its signature count; code that came with the model decides for itself.

    Args:
        model_class: The model's class, or None where it is not known.
        names: The argument names.
    """
    if model_class is None:
        return set()
    parameters = inspect.signature(model_class.__init__).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        module = model_class.__module__
        if not module.startswith(("transformers.models.", "transformers.modeling_")):
            return set(names)
    own = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return (own - {"self", "config"}) & set(names)


def refuse_unknown(path: str, unknown: Iterable[str], config: Any, given: bool) -> None:
    """Refuse arguments that are no field of the config and that nothing else takes.

    Args:
        path: What is to be read, for messages.
        unknown: Their names.
        config: The model's config.
        given: Whether the caller gave the config as an object. transformers changes no field of
            such a config either, except `attn_implementation` and `experts_implementation`.

    Raises:
        PlaitError: There are any; all of them are named, with the closest known names.
    """
    problems, fields = [], []
    known = {*HUB, *REFUSED, *_HONOURED, *config.to_dict()}
    for name in unknown:
        if given and hasattr(config, name):
            fields.append(name)
            problems.append(f"{name} is a field of the config, which was given as an object")
            continue
        near = difflib.get_close_matches(name, sorted(known), 3)
        hint = f" (closest: {', '.join(near)})" if near else ""
        problems.append(
            f"{name} is no argument of from_pretrained and no field of "
            f"{type(config).__name__}{hint}"
        )
    if not problems:
        return
    ways = [f"set {', '.join(f'config.{name}' for name in fields)} before"] if fields else []
    ways += ["leave config= out: fields are then applied to the saved config"] if fields else []
    raise PlaitError(
        f"from_pretrained({path!r}, {', '.join(f'{name}=…' for name in unknown)}):",
        problems,
        ways or ["correct the name", "leave it out"],
    )
