"""Fine-tune SmolLM2-135M with transformers' Trainer, over any layout.

    python examples/trainer_smollm2.py
    torchrun --nproc-per-node 2 examples/trainer_smollm2.py --tp 2
    torchrun --nproc-per-node 4 examples/trainer_smollm2.py --tp 2 --dp-shard 2

All three print the same losses: the batch is that of all processes together, and the samples come
in the same order. The first one is transformers alone. The texts and the model are those of
examples/train_smollm2.py.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from train_smollm2 import documentation, model_file

import plait


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description="SmolLM2 in a Trainer")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--dp-shard", type=int, default=1, help="groups of ranks with own samples")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--output", type=Path, default=Path("trainer-output"))
    return parser.parse_args(words)


def samples(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """The first texts, one after the other, cut into pieces of equal lengths."""
    file = model_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids: list[int] = []
    for text in documentation():
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= count * length:
            break
    pieces = torch.tensor(ids[: count * length]).view(count, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def read_model(asked: argparse.Namespace) -> Any:
    """The model, split or whole."""
    file = model_file()
    if asked.tp * asked.dp_shard == 1:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        model.is_quantized = False  # it was in the file; the Trainer would refuse it
        return model
    config = plait.DistributedConfig(tp_size=asked.tp, dp_shard_size=asked.dp_shard)
    return plait.AutoModelForCausalLM.from_pretrained(
        file, dtype=torch.float32, distributed_config=config
    )


def train(asked: argparse.Namespace, data: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Train; gives what the Trainer has logged at each step."""
    args = transformers.TrainingArguments(
        output_dir=str(asked.output),
        per_device_train_batch_size=asked.batch_size // asked.dp_shard,
        max_steps=asked.steps,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(model=read_model(asked), args=args, train_dataset=data)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train, and write down the losses."""
    asked = arguments()
    steps = train(asked, samples(asked.steps * asked.batch_size, asked.length))
    if int(os.environ.get("RANK", 0)) == 0:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
