"""Saving a model of 1 GB from 4 ranks: how long it takes, and how much memory beyond the model.

    python benchmarks/saving.py
    python benchmarks/saving.py --layers 2 --hidden 256 --rounds 1 --json -

What is measured and how: benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers import llama_config, parameter_bytes

from ranks import Ranks, Sample, memory_bytes, reset_peak, spread, table, timed

WAYS = ("save_pretrained", "checkpoint.save", "checkpoint.load", "asynchronous, call")


@dataclass(frozen=True)
class Save:
    """One rank's share of a save.

    Attributes:
        took: Time, from when all ranks were there.
        extra_bytes: Peak of resident memory beyond what was resident before.
        own_bytes: The parameters that the rank holds.
    """

    took: Sample
    extra_bytes: int
    own_bytes: int


class Saver:
    """One rank of a split model whose weights are in memory, not in mapped files."""

    def __init__(self, sizes: tuple[int, int, int], dp: int) -> None:
        import plait

        world = torch.distributed.get_world_size()
        config = plait.DistributedConfig(tp_size=world // dp, dp_shard_size=dp)
        self.model = plait.AutoModelForCausalLM.from_config(
            llama_config(*sizes), dtype=torch.bfloat16, distributed_config=config
        )
        small = plait.AutoModelForCausalLM.from_config(
            llama_config(1, 64, 96), dtype=torch.bfloat16, distributed_config=config
        )
        with tempfile.TemporaryDirectory() as folder:  # what the first save imports
            small.save_pretrained(self._same(folder))
            plait.checkpoint.save(self._same(folder), small)
            plait.checkpoint.load(self._same(folder), small)

    @staticmethod
    def _same(folder: str) -> str:
        """The first rank's folder."""
        told = [folder]
        torch.distributed.broadcast_object_list(told)
        return f"{told[0]}/warm"

    def save(self, way: str, folder: str, shard: str) -> Save:
        """Save or load once."""
        import plait

        pending: list[Any] = []
        works: dict[str, Callable[[], Any]] = {
            "save_pretrained": lambda: self.model.save_pretrained(
                f"{folder}/plain", max_shard_size=shard
            ),
            "checkpoint.save": lambda: plait.checkpoint.save(f"{folder}/run", self.model, keep=1),
            "checkpoint.load": lambda: plait.checkpoint.load(f"{folder}/run", self.model),
            "asynchronous, call": lambda: pending.append(
                plait.checkpoint.save(f"{folder}/run", self.model, keep=1, asynchronous=True)
            ),
        }
        reset_peak()
        before = memory_bytes("VmRSS")
        took = timed(works[way])
        for one in pending:
            one.wait()
        extra = memory_bytes("VmHWM") - before
        return Save(took, extra, parameter_bytes(self.model))


def largest_bytes(sizes: tuple[int, int, int]) -> tuple[int, int]:
    """The bytes of the largest tensor, and of all."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(*sizes), dtype=torch.bfloat16)
    found = [p.numel() * p.element_size() for p in model.parameters()]
    return max(found), sum(found)


HEAD = (
    "median (min–max)",
    "wall s",
    "processor s, all ranks",
    "memory beyond the model, MB: first rank",
    "most of the others",
)


def report(rounds: dict[str, list[list[Save]]]) -> str:
    """One line per way."""
    rows = []
    for way, saves in rounds.items():
        samples = [Sample.of_ranks([save.took for save in group]) for group in saves]
        first = statistics.median(group[0].extra_bytes for group in saves)
        others = statistics.median(max(s.extra_bytes for s in group[1:]) for group in saves)
        rows.append(
            [
                way,
                spread([sample.wall_s for sample in samples]),
                spread([sample.cpu_s for sample in samples]),
                f"{first / 1e6:.0f}",
                f"{others / 1e6:.0f}",
            ]
        )
    return table(HEAD, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--shard", default="250MB", help="size of one weight file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dp", type=int, default=1, help="ranks that FSDP shards over")
    parser.add_argument("--json", metavar="FILE", help="write the samples too; - is the output")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1")
    sizes = args.layers, args.hidden, args.vocab
    largest, total = largest_bytes(sizes)
    rounds: dict[str, list[list[Save]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="benchmark-saving-") as folder:
        with Ranks(args.ranks, Saver, sizes, args.dp) as group:
            for number in range(args.rounds):
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
                for way in WAYS:
                    rounds[way].append(group.ask("save", way, folder, args.shard))
    if args.json:
        found = {"rounds": rounds, "largest_bytes": largest, "total_bytes": total}
        text = json.dumps(found, indent=1, default=asdict)
        if args.json == "-":
            print(text)
            return
        Path(args.json).write_text(text)
    print(
        f"{total / 1e6:.0f} MB on {args.ranks} ranks (dp_shard {args.dp}), files of {args.shard}, "
        f"the largest tensor {largest / 1e6:.0f} MB\n"
    )
    print(report(rounds))


if __name__ == "__main__":
    main()
