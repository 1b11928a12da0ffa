"""`load_adapter` of a split model of transformers: PEFT's files into cut factors."""

from typing import Any

from plait.errors import PlaitError


def load_adapter(
    self: Any,
    peft_model_id: str | None = None,
    adapter_name: str | None = None,
    peft_config: Any = None,
    adapter_state_dict: dict[str, Any] | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """Add an adapter and read its weights (bound: `model.load_adapter(directory)`).

    Args:
        self: The split model.
        peft_model_id: A directory with PEFT's files, or a name on the hub.
        adapter_name: What to call it; `"default"`.
        peft_config: Its config, where it is not read from the files.
        adapter_state_dict: Its weights, where they are not read from the files.
        is_trainable: Whether it will be trained.
        **kwargs: For PEFT's download: `revision`, `token`, `subfolder`, `cache_dir`, ….

    Returns:
        The keys that were missing or unexpected, as `load_state_dict` has them.

    Raises:
        PlaitError: Neither files nor config and weights are given, or the name is taken.

    Comm:
        As [`adopt`][plait.surgery.adopting.adopt].
    """
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    name = adapter_name if adapter_name is not None else "default"
    asked = f"load_adapter({peft_model_id!r}, {name!r}):"
    if kwargs.pop("hotswap", False):
        raise PlaitError(asked, "hotswap exchanges weights of one process", "a second adapter_name")
    if peft_model_id is None and (peft_config is None or adapter_state_dict is None):
        raise PlaitError(asked, "there is nothing to read", "a directory with an adapter's files")
    if self._hf_peft_config_loaded and name in self.peft_config:
        raise PlaitError(asked, f"there is an adapter {name!r} already", "another adapter_name")
    for unused in ("device_map", "low_cpu_mem_usage", "offload_folder", "offload_index"):
        kwargs.pop(unused, None)
    kwargs |= kwargs.pop("adapter_kwargs", None) or {}
    config = peft_config or PeftConfig.from_pretrained(peft_model_id, **kwargs)
    config.inference_mode = not is_trainable
    weights = adapter_state_dict or load_peft_weights(peft_model_id, device="cpu", **kwargs)
    weights = {key.removeprefix("base_model.model."): x for key, x in weights.items()}
    self._hf_peft_config_loaded = True
    inject_adapter_in_model(config, self, name)
    result = set_peft_model_state_dict(self, weights, name)
    if not is_trainable:
        self.eval()
    return result
