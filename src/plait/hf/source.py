"""Where a model comes from: its config and its weight files, in a directory or on the hub."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, WeightsError
from plait.hf import arguments, gguf
from plait.hf.arguments import Arguments
from plait.hf.skeleton import model_class, override, read_config, refuse_quantized
from plait.weights import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Source:
    """A model's config, and where its weights are; none of them has been looked at.

    Attributes:
        config: The config of transformers; the model may change it.
        path: A directory, a weight file, or a model's name on the hub.
        hub: Arguments that say where files come from.
        arguments: What else the caller asked for.
        model_class: The class that comes with the model and makes it, or None: transformers' own.
        model_kwargs: What the making of the model takes beside config and dtype.
    """

    config: Any
    path: str
    hub: Mapping[str, Any]
    arguments: Arguments
    model_class: Any = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in a GGUF file."""
        return self.path.endswith(".gguf")

    def open(self) -> Checkpoint:
        """The checkpoint; every header is read and checked, files of the hub are fetched.

        Raises:
            WeightsError: There are no weights under this name, or a file is missing or damaged.
        """
        asked = self.arguments
        files = _files(self.path, self.hub, asked.variant, asked.use_safetensors)
        return open_checkpoint(files, asked.variant, mapped=not asked.disable_mmap)


def find(auto_class: Any, path: str, hub: Mapping[str, Any], asked: Arguments) -> Source:
    """Find a model's config and where its weights are.

    Args:
        auto_class: The auto class of transformers that would read it.
        path: A directory, a GGUF file, or a model's name on the hub.
        hub: Arguments that say where files come from.
        asked: The other arguments of `from_pretrained`.

    Raises:
        PlaitError: An argument is unknown, or is refused for what is read.
        WeightsError: There is no such model, or no config.
    """
    if asked.gguf_file is not None:
        path = _gguf_path(path, asked.gguf_file, hub)
    is_gguf = path.endswith(".gguf")
    given = hasattr(asked.config, "to_dict")
    code = {"trust_remote_code": asked.trust_remote_code, "code_revision": asked.code_revision}
    if is_gguf:
        arguments.refuse_for_gguf(path, asked)
    else:
        _refuse_adapter(path, hub)
    if given:
        config, rest = copy.deepcopy(asked.config), dict(asked.fields)
    elif is_gguf:
        config = gguf.gguf_config(path)
        rest = override(config, asked.fields)
    else:
        known = {name: value for name, value in code.items() if value is not None}
        config, rest = read_config(asked.config or path, hub, {**asked.fields, **known})
        rest = {name: value for name, value in rest.items() if name not in code}
    if not is_gguf:
        refuse_quantized(config)
    made_by, own_code = model_class(auto_class, config, path, hub, code)
    unknown = set(rest) - arguments.taken_by(made_by, rest)
    arguments.refuse_unknown(path, sorted(unknown), config, given)
    kwargs = {**asked.implementations, **rest}
    if not own_code and asked.trust_remote_code is not None:
        kwargs["trust_remote_code"] = asked.trust_remote_code
    return Source(config, path, hub, asked, made_by if own_code else None, kwargs)


def _gguf_path(path: str, name: str, hub: Mapping[str, Any]) -> str:
    if os.path.isdir(path):
        return os.path.join(path, hub.get("subfolder") or "", name)
    from transformers.utils.hub import cached_file

    try:
        return str(cached_file(path, name, **hub))
    except OSError as error:
        raise WeightsError(
            f"Reading {name} of {path!r}:",
            " ".join(str(error).split()),
            ["check the names of repository and file"],
        ) from error


def _refuse_adapter(path: str, hub: Mapping[str, Any]) -> None:
    if _cached(path, "adapter_config.json", hub) is None:
        return
    raise PlaitError(
        f"A split model from {path!r}:",
        "it holds an adapter (adapter_config.json), and adapters are not read into a split model",
        [arguments.REFUSED["adapter_kwargs"][1], "tp_size=1 reads with transformers alone"],
    )


def _cached(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of a directory or of the hub, or None where there is none."""
    if os.path.isdir(path):
        file = os.path.join(path, hub.get("subfolder") or "", name)
        return file if os.path.isfile(file) else None
    if os.path.exists(path):
        return None
    from transformers.utils.hub import cached_file

    quiet = dict.fromkeys(("missing_entries", "gated_repo", "connection_errors"), False)
    options = {f"_raise_exceptions_for_{what}": value for what, value in quiet.items()}
    try:
        return cached_file(path, name, **hub, **options)
    except OSError:  # no such name: the config is looked for next, and says so
        return None


def _files(
    path: str, hub: Mapping[str, Any], variant: str | None, safetensors: bool | None
) -> Path | list[Path]:
    """A directory, weight files or an index; files of the hub are fetched into its cache."""
    local = os.path.isdir(path)
    if local and safetensors is None:
        return Path(path, hub.get("subfolder") or "")
    if os.path.isfile(path):
        return Path(path)
    from transformers.utils.hub import get_checkpoint_shard_files

    middle = f".{variant}" if variant else ""
    stems = {"safetensors": "model", "bin": "pytorch_model"}
    if safetensors is not None:
        stems.pop("bin" if safetensors else "safetensors")
    looked_for = []
    for ending, stem in stems.items():
        names = (f"{stem}{middle}.{ending}", f"{stem}.{ending}.index{middle}.json")
        for name in names:
            looked_for.append(name)
            file = _cached(path, name, hub)
            if file is not None:
                if not name.endswith(".json"):
                    return Path(file)
                parts, _ = get_checkpoint_shard_files(path, file, **hub)  # beside the index
                return [Path(part) for part in parts] if variant else Path(file)
    chosen = "" if safetensors is None else f"use_safetensors={safetensors} reads only these, and "
    raise WeightsError(
        f"Reading the weights of {path!r}:",
        f"{chosen}there is none of {', '.join(looked_for)}",
        ["leave use_safetensors out"]
        if local
        else ["check the name", "give the path of a directory with config.json and *.safetensors"],
    )
