"""Where a model comes from: its config and its weight files, in a directory or on the hub."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import WeightsError
from plait.hf import gguf
from plait.hf.skeleton import read_config, refuse_quantized

HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Arguments of `from_pretrained` that say where files come from."""

_NOT_OURS = ("low_cpu_mem_usage", "use_safetensors", "weights_only")


@dataclass(frozen=True)
class Source:
    """A model's config, and where its weights are; none of them has been looked at.

    Attributes:
        config: The config of transformers.
        path: A directory, a weight file, or a model's name on the hub.
        hub: Arguments that say where files come from.
        dtype: What the caller asked for: a dtype, its name, `"auto"` or None.
        model_kwargs: What the caller gave for the making of the model.
        variant: The variant of the weight files (`"fp16"`), if the caller asked for one.
        key_mapping: The caller's renamings of checkpoint names, if any.
    """

    config: Any
    path: str
    hub: Mapping[str, Any]
    dtype: Any = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    key_mapping: Mapping[str, str] | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in a GGUF file."""
        return self.path.endswith(".gguf")

    def files(self) -> Path:
        """A directory, a weight file or an index; files of the hub are fetched into its cache.

        Raises:
            WeightsError: The hub has no weights under this name.
        """
        return _files(self.path, self.hub, self.variant)


def find(path: str, hub: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Source:
    """Find a model's config and where its weights are.

    Args:
        path: A directory, a GGUF file, or a model's name on the hub.
        hub: Arguments that say where files come from.
        kwargs: The other arguments of `from_pretrained`: overrides of config fields, and what the
            making of the model takes.

    Raises:
        WeightsError: There is no such model, or no config.
    """
    rest = dict(kwargs)
    old = rest.pop("torch_dtype", None)
    dtype = rest.pop("dtype", old)
    variant = rest.pop("variant", None)
    key_mapping = rest.pop("key_mapping", None)
    for name in _NOT_OURS:
        rest.pop(name, None)
    gguf_file = rest.pop("gguf_file", None)
    if gguf_file is not None:
        path = os.path.join(path, gguf_file)
    model_kwargs: dict[str, Any] = {
        name: rest.pop(name)
        for name in ("attn_implementation", "experts_implementation")
        if name in rest
    }
    config = rest.pop("config", None)
    trust = rest.pop("trust_remote_code", None)
    if trust is not None:
        model_kwargs["trust_remote_code"] = trust
    if path.endswith(".gguf"):
        config = config if config is not None else gguf.gguf_config(path)
        for name, value in rest.items():
            setattr(config, name, value)
        return Source(config, path, hub, dtype, model_kwargs)
    if not hasattr(config, "to_dict"):
        known = {} if trust is None else {"trust_remote_code": trust}
        config, unused = read_config(config or path, hub, {**rest, **known})
        model_kwargs |= {n: v for n, v in unused.items() if n != "trust_remote_code"}
    refuse_quantized(config)
    return Source(config, path, hub, dtype, model_kwargs, variant, key_mapping)


def _files(path: str, hub: Mapping[str, Any], variant: str | None) -> Path:
    if os.path.isdir(path):
        return Path(path, hub.get("subfolder") or "")
    if os.path.exists(path):
        return Path(path)
    from transformers.utils import hub as hub_files

    middle = f".{variant}" if variant else ""
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin")):
        options = {**hub, "_raise_exceptions_for_missing_entries": False}
        index = hub_files.cached_file(path, f"{stem}.{ending}.index{middle}.json", **options)
        if index is not None:
            hub_files.get_checkpoint_shard_files(path, index, **hub)  # fetched beside the index
            return Path(index)
        single = hub_files.cached_file(path, f"{stem}{middle}.{ending}", **options)
        if single is not None:
            return Path(single)
    raise WeightsError(
        f"Reading {path!r}:",
        "it is no directory here, and the hub has no weight file under that name",
        ["check the name", "give the path of a directory with config.json and *.safetensors"],
    )
