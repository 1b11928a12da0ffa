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
from pathlib import Path
from typing import Any

import torch
import transformers
from train_smollm2 import documentation, model_file

import plait


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description="SmolLM2 in a Trainer")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--dp-shard", type=int, default=1, help="groups of ranks with own samples")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample at most")
    parser.add_argument("--output", type=Path, default=Path("trainer-output"))
    return parser.parse_args()


def samples(tokenizer: Any, count: int, length: int) -> list[dict[str, Any]]:
    """The first texts, as ids."""
    texts = [text for text, _ in zip(documentation(), range(count), strict=False)]
    return [dict(tokenizer(text, truncation=True, max_length=length)) for text in texts]


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


def main() -> None:
    """Train, and write the losses."""
    asked = arguments()
    file = model_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    args = transformers.TrainingArguments(
        output_dir=str(asked.output),
        per_device_train_batch_size=asked.batch_size // asked.dp_shard,
        max_steps=asked.steps,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(
        model=read_model(asked),
        args=args,
        train_dataset=samples(tokenizer, asked.steps * asked.batch_size, asked.length),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
