"""GGUF files as transformers models: configuration, tokenizer, and how the weights are made.

The tables are transformers' and the gguf package's own. transformers reads the header of a file
with a general reader that takes seconds for a vocabulary; configuration and tokenizer are therefore
built here from the header that plait has read already, and fall back to transformers' reader for
the architectures whose configuration needs more than renamed fields.

Written against transformers 5.23 and gguf 0.19.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from plait.errors import WeightsError
from plait.hf.conversion import Conversion, completed, convert
from plait.weights.checkpoint import Checkpoint
from plait.weights.gguf import gguf_header
from plait.weights.recipes import Concat, Map, Recipe, Regroup, Source, Transpose, Unsqueeze

_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_TEXT_PART = {"gemma3": "gemma3_text"}
_FIELDS_ONLY = frozenset(
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen2moe",
        "qwen3moe",
        "phi3",
        "gemma2",
        "gemma3",
        "starcoder2",
        "falcon",
        "nemotron",
        "gpt2",
    ]
)
"""Architectures whose configuration is the header's fields under other names."""

_ALSO = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3_moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2_moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
}
"""Fields that files hold and that transformers' table leaves at the default of the config class."""


def gguf_config(path: str | os.PathLike[str]) -> Any:
    """Builds the transformers configuration that a GGUF file describes.

    Args:
        path: The file.

    Returns:
        A `PreTrainedConfig` of the model's own class.

    Raises:
        WeightsError: The file is damaged, or transformers does not know its architecture.
    """
    from transformers import AutoConfig
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

    path = Path(path)
    header = gguf_header(path)
    arch = header.metadata.get("general.architecture")
    try:
        if arch in GGUF_CONFIG_ARCHS:
            fields = get_gguf_config(header.metadata, tuple(header.tensors))
            return AutoConfig.for_model(**fields)
        if arch in _FIELDS_ONLY:
            fields = _renamed_fields(str(arch), header.metadata)
            fields["tie_word_embeddings"] = (
                arch == "falcon" or "output.weight" not in header.tensors
            )
            return AutoConfig.for_model(**fields)
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise WeightsError(
            f"Build the configuration of {path}.",
            f"transformers has none for the GGUF architecture {arch!r}: {error}",
        ) from error


def gguf_tokenizer(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Builds the tokenizer that a GGUF file holds, with its chat template.

    Args:
        path: The file.
        **kwargs: Passed on to the tokenizer.

    Raises:
        WeightsError: transformers cannot build a tokenizer of its kind.
    """
    from transformers import PreTrainedTokenizerFast

    path = Path(path)
    try:
        return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, **kwargs)
    except (ValueError, KeyError) as error:
        raise WeightsError(f"Build the tokenizer of {path}.", str(error)) from error


def gguf_conversion(model: nn.Module, checkpoint: Checkpoint) -> Conversion:
    """Finds how a transformers model is made from the tensors of a GGUF file.

    Args:
        model: The model, built from `gguf_config`; its parameters may be on meta.
        checkpoint: The open file.

    Raises:
        WeightsError: The architecture is one whose layout plait does not undo.
    """
    from transformers.integrations.gguf import is_gguf_arch_supported
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

    arch = str(checkpoint.metadata.get("general.architecture"))
    if is_gguf_arch_supported(arch):
        tables = get_gguf_conversion_mapping(arch, model.config)
        return convert(model, checkpoint, tables=tables)
    if arch not in _UNDO:
        raise WeightsError(
            f"Load {checkpoint.files.origin}.",
            f"its architecture is {arch!r}; known are {', '.join(sorted(_UNDO))}",
            "Load it with transformers, save it as safetensors, and load that.",
        )
    names = _names(model, arch)
    by_target: dict[str, list[str]] = {}
    for key in checkpoint.keys():  # noqa: SIM118
        if key in names:
            by_target.setdefault(names[key], []).append(key)
    recipes = {
        target: _UNDO[arch](model.config, keys, checkpoint) for target, keys in by_target.items()
    }
    unmatched = [(key, key) for key in checkpoint.keys() if key not in names]  # noqa: SIM118
    unmatched = [pair for pair in unmatched if pair[0] != "rope_freqs.weight"]
    return completed(model, checkpoint, recipes, unmatched)


def _renamed_fields(arch: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """The configuration fields of a header, by transformers' table of names."""
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    kind = _RENAMED.get(arch, arch)
    if arch == "llama" and metadata.get("general.name") == "mistral":
        kind = "mistral"
    fields = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {}))
    for key, value in metadata.items():
        prefix, _, rest = key.partition(".")
        table = GGUF_CONFIG_MAPPING.get(kind if prefix == arch else prefix, {})
        if table.get(rest):
            single = isinstance(value, list) and len(value) == 1
            fields[table[rest]] = value[0] if single else value
    fields["model_type"] = _TEXT_PART.get(kind, kind)
    for key, field in _ALSO.get(kind, {}).items():
        if f"{arch}.{key}" in metadata:
            fields.setdefault(field, metadata[f"{arch}.{key}"])
    if "vocab_size" not in fields:
        fields["vocab_size"] = metadata["tokenizer.ggml.tokens"]
    return fields


def _names(model: Any, arch: str) -> dict[str, str]:
    """The model's name of each tensor that a file of this architecture may hold."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    table = get_tensor_name_map(number, model.config.get_text_config().num_hidden_layers)
    names: dict[str, str] = {}
    for target in model.state_dict():
        stem, dot, leaf = target.rpartition(".")
        if leaf not in ("weight", "bias"):
            stem, dot, leaf = target, ".", "weight"  # a bare parameter of fused experts
        if stem.endswith("experts.gate_up_proj"):
            layer = next(part for part in stem.split(".") if part.isdigit())
            for half in ("gate", "up"):
                names[f"blk.{layer}.ffn_{half}_exps.weight"] = target
        elif (found := _found(table, stem)) is not None:
            names[found + dot + leaf] = target
    return names


def _found(table: Any, stem: str) -> str | None:
    """The file's name of a module, whose name may have more prefixes than the table knows."""
    parts = stem.split(".")
    tries = (table.get_name(".".join(parts[skip:])) for skip in range(len(parts)))
    return next((found for found in tries if found is not None), None)


def _plain(config: Any, keys: list[str], checkpoint: Checkpoint) -> Recipe:
    return Source(keys[0])


def _llama(config: Any, keys: list[str], checkpoint: Checkpoint) -> Recipe:
    """Query and key rows of a head lie in pairs in the file, in halves in the model."""
    key = keys[0]
    heads = config.num_attention_heads if ".attn_q." in key else config.num_key_value_heads
    if not re.search(r"\.attn_[qk]\.", key):
        return Source(key)
    half = checkpoint.info(key)[0][0] // heads // 2
    return Regroup(0, heads, half, 2, Source(key))


def _norms_plus_one(config: Any, keys: list[str], checkpoint: Checkpoint) -> Recipe:
    """The file stores the factor of a norm, the model its difference from one."""
    if "norm.weight" in keys[0]:
        return Map(_minus_one, Source(keys[0]))
    return Source(keys[0])


def forget_quantizer(model: Any) -> None:
    """Let a model that transformers has dequantised from a GGUF file be saved and trained as any.

    It keeps the quantizer that read the file, and would refuse to be saved because of it.
    """
    in_blocks = any("gguf" in type(part).__module__ for part in model.modules())
    if in_blocks or not all(param.is_floating_point() for param in model.parameters()):
        return  # weights left as they are in the file
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(mark, None)


def _minus_one(x: Any) -> Any:
    return x - 1


def _experts(config: Any, keys: list[str], checkpoint: Checkpoint) -> Recipe:
    """Gate and up of all experts are two tensors in the file, one in the model."""
    if len(keys) == 2:
        gate, up = sorted(keys, key=lambda key: "ffn_up_exps" in key)
        return Concat(1, (Source(gate), Source(up)))
    if "ffn_gate_inp_shexp" in keys[0] and len(checkpoint.info(keys[0])[0]) == 1:
        return Unsqueeze(0, Source(keys[0]))
    return Source(keys[0])


def _conv1d(config: Any, keys: list[str], checkpoint: Checkpoint) -> Recipe:
    """The model stores its linear layers as (input features, output features)."""
    if re.search(r"\.(attn_qkv|attn_output|ffn_down|ffn_up)\.weight$", keys[0]):
        return Transpose(0, 1, Source(keys[0]))
    return Source(keys[0])


_UNDO: dict[str, Callable[[Any, list[str], Checkpoint], Recipe]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen3": _plain,
    "phi3": _plain,
    "starcoder2": _plain,
    "falcon": _plain,
    "stablelm": _plain,
    "gemma2": _norms_plus_one,
    "gemma3": _norms_plus_one,
    "nemotron": _norms_plus_one,
    "qwen2moe": _experts,
    "qwen3moe": _experts,
    "gpt2": _conv1d,
}
"""For each GGUF architecture what undoes the layout of the tool that wrote the file."""
