"""From a prompt to tokens and from tokens to text, for the commands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Message = dict[str, str]
"""One turn of a conversation: `role` (system, user, assistant) and `content`."""


def silence() -> None:
    """Keeps transformers' warnings and progress bars off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to a model.

    Args:
        path: A directory, a GGUF file, or a model's name on the hub.

    Returns:
        A tokenizer of transformers.
    """
    from transformers import AutoTokenizer

    from plait.hf.gguf import gguf_tokenizer

    if path.endswith(".gguf"):
        return gguf_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


def encode(
    tokenizer: Any, messages: Sequence[Message], use_template: bool | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The model's input for a conversation, `[1, length]` each.

    Args:
        tokenizer: The model's tokenizer.
        messages: The turns; the model is to give the next one.
        use_template: Write them in the model's chat format; `False` takes the turns' contents as
            they are, a line each; `None` decides by whether the tokenizer has a chat template.
        device: Where the tensors go.
    """
    templated = has_template(tokenizer) if use_template is None else use_template
    if templated:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n".join(turn["content"] for turn in messages), return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return {name: encoded[name].to(device) for name in names if name in encoded}


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer knows the model's chat format."""
    return getattr(tokenizer, "chat_template", None) is not None


def streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """A streamer that writes new text as soon as it is final.

    Args:
        tokenizer: The model's tokenizer.
        write: Called with each further piece of text.
    """
    from transformers import TextStreamer

    class Writer(TextStreamer):  # type: ignore[misc]
        """transformers' word-by-word decoding, written to `write`."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            """Passes a piece on."""
            if text:
                write(text)

    return Writer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def generated(
    model: Any,
    inputs: dict[str, torch.Tensor],
    settings: dict[str, Any],
    streamer: Any = None,
) -> list[int]:
    """The new tokens of one sequence.

    Args:
        model: The model, split or not.
        inputs: What `encode` returned.
        settings: Further arguments of `generate`.
        streamer: Takes the tokens as they come.
    """
    tokens = model.generate(**inputs, **settings, streamer=streamer)
    return [int(token) for token in tokens[0, inputs["input_ids"].shape[1] :]]
