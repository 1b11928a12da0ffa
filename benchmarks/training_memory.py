"""Peak memory of a training step: where the logits are most of it, and where the layers are.

    python benchmarks/training_memory.py                    # both cases
    python benchmarks/training_memory.py --only head --rounds 1
    python benchmarks/training_memory.py --vocab 4000 --hidden 128 --json -

What is measured and how: benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import llama_config, one_process, torch_tp, transformers_tp, write_checkpoint
from torch import nn

from ranks import Ranks, memory_bytes, reset_peak, table, trim


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        title: What is large in it.
        layers: Number of layers.
        hidden: Hidden size.
        vocab: Size of the vocabulary.
        sequence: Tokens of each of the two samples.
    """

    title: str
    layers: int
    hidden: int
    vocab: int
    sequence: int


CASES = {
    "head": Case("large vocabulary", 2, 512, 128_256, 1024),
    "body": Case("long sequences", 8, 512, 2048, 2048),
}


def plait(path: str, **sizes: Any) -> nn.Module:
    """plait, split as the sizes say."""
    from plait import AutoModelForCausalLM, DistributedConfig

    config = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", distributed_config=config)


def torch_fsdp(path: str) -> nn.Module:
    """torch's `fully_shard` of every layer and of the rest."""
    from torch.distributed.fsdp import fully_shard

    model = one_process(path)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        title: How it is named in the table.
        read: The name of its function in `READERS`.
        loss_parallel: Whether torch's context of this name is around the step.
        own_samples: Whether each rank takes its own half of the batch.
    """

    title: str
    read: str
    loss_parallel: bool = False
    own_samples: bool = False


def readers(ranks: int) -> dict[str, Callable[[str], nn.Module]]:
    """How each contender's model is made of the checkpoint."""
    return {
        "one": one_process,
        "plait": lambda path: plait(path, tp_size=ranks),
        "sequence": lambda path: plait(path, tp_size=ranks, enable_sequence_parallel=True),
        "transformers": transformers_tp,
        "torch": lambda path: torch_tp(path, "split"),
        "plait shard": lambda path: plait(path, dp_shard_size=ranks),
        "torch shard": torch_fsdp,
    }


ROWS = (
    Row("one process", "one"),
    Row("transformers TP", "transformers"),
    Row("torch `parallelize_module`", "torch"),
    Row("… with `loss_parallel`", "torch", loss_parallel=True),
    Row("plait, `tp_size`", "plait"),
    Row("… with `enable_sequence_parallel`", "sequence"),
    Row("torch `fully_shard`, samples divided", "torch shard", own_samples=True),
    Row("plait, `dp_shard_size`, samples divided", "plait shard", own_samples=True),
)


class Subject:
    """One rank's model and batch."""

    def __init__(self, row: Row, path: str, case: Case, ranks: int) -> None:
        self.row, self.case = row, case
        self.model = readers(ranks)[row.read](path).train()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(case.vocab, (ranks, case.sequence), generator=generator)
        self.ids = ids[dist.get_rank() :][:1] if row.own_samples else ids
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        trim()

    def step(self) -> tuple[float, int, int]:
        """One training step: the loss, the peak of resident memory, what was resident before."""
        from torch.distributed.tensor.parallel import loss_parallel

        reset_peak()
        before = memory_bytes("VmRSS")
        with loss_parallel() if self.row.loss_parallel else nullcontext():
            loss = self._loss()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        value = float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
        return value, memory_bytes("VmHWM"), before

    def _loss(self) -> torch.Tensor:
        if self.row.read != "torch":
            return self.model(self.ids, labels=self.ids, use_cache=False).loss
        logits = self.model(self.ids, use_cache=False).logits
        if not self.row.loss_parallel:  # what a head with whole output does
            from torch.distributed.tensor import Replicate

            logits = logits.redistribute(placements=[Replicate()]).to_local()
            return self.model.loss_function(logits, self.ids, self.case.vocab)  # type: ignore[operator]
        labels = F.pad(self.ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def measure(case: Case, path: str, rounds: int, ranks: int) -> dict[str, dict[str, float]]:
    """Every contender in new processes: the medians over `rounds` steps, of the fullest rank.

    The first step makes the optimizer's state and is not counted.
    """
    found: dict[str, dict[str, float]] = {}
    expected: list[float] = []
    for row in ROWS:
        print(f"{case.title}: {row.title}", file=sys.stderr)
        with Ranks(1 if row.read == "one" else ranks, Subject, row, path, case, ranks) as group:
            steps = [group.ask("step") for _ in range(rounds + 1)]
        # The loss of divided samples of equal length is the mean of theirs.
        losses = [statistics.fmean(loss for loss, _, _ in step) for step in steps]
        expected = expected or losses
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if worst > 2e-4:
            raise SystemExit(f"{row.title}: losses {losses} differ from one process's {expected}")
        found[row.title] = {
            "peak": statistics.median(max(peak for _, peak, _ in step) for step in steps[1:]),
            "of_the_step": statistics.median(
                max(peak - before for _, peak, before in step) for step in steps[1:]
            ),
        }
    return found


def report(case: Case, found: dict[str, dict[str, float]], ranks: int) -> str:
    """A markdown table."""
    peer = found["transformers TP"]
    rows = [
        [
            title,
            f"{f['peak'] / 1e6:.0f}",
            f"{f['peak'] / peer['peak']:.2f}",
            f"{f['of_the_step'] / 1e6:.0f}",
        ]
        for title, f in found.items()
    ]
    named = (
        f"{case.title}: {case.layers} × {case.hidden}, vocabulary {case.vocab:,}, {ranks} × "
        f"{case.sequence} tokens"
    )
    head = [named, "peak, MB per rank", "÷ transformers'", "of it beyond what was held before"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("layers", "hidden", "vocab", "sequence"):
        parser.add_argument(f"--{name}", type=int, help="instead of the case's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", metavar="FILE", help="write the figures too; - is the output")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1")
    cases, results = {}, {}
    for key in args.only:
        own = asdict(CASES[key])
        asked = {name: getattr(args, name, None) for name in own}
        case = Case(**{name: own[name] if x is None else x for name, x in asked.items()})
        with tempfile.TemporaryDirectory(prefix="benchmark-model-") as path:
            config = llama_config(case.layers, case.hidden, case.vocab)
            write_checkpoint(Path(path), config, torch.float32)
            cases[key], results[key] = case, measure(case, path, args.rounds, args.ranks)
    text = json.dumps({key: {**asdict(cases[key]), "bytes": results[key]} for key in cases})
    if args.json == "-":
        print(text)
        return
    if args.json:
        Path(args.json).write_text(text)
    print("\n\n".join(report(cases[key], results[key], args.ranks) for key in cases))


if __name__ == "__main__":
    main()
