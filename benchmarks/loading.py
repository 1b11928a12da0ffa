"""Reading a checkpoint of 1 GB on 2 ranks: plait beside transformers' own tensor parallelism.

    python benchmarks/loading.py
    python benchmarks/loading.py --layers 2 --hidden 256 --rounds 1 --json -

What is measured and how: benchmarks/README.md.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers import READERS, llama_config, parameter_bytes, write_checkpoint

from ranks import Ranks, Sample, memory_bytes, ratios, reset_peak, spread, table, timed

CONTENDERS = ("plait", "transformers")


@dataclass(frozen=True)
class Load:
    """One rank's reading of one checkpoint, up to the end of a first forward of one token.

    (A loader may leave weights in mapped files; they are really read when they are first used.)

    Attributes:
        returned: Time until from_pretrained returns.
        ready: Time until the first forward has ended.
        own_bytes: The parameters that the rank holds afterwards.
        extra_bytes: Peak of resident memory over what was resident before, less `own_bytes`; pages
            of mapped files count.
        extra_anonymous_bytes: The same of memory that no file backs; None where not watched.
        disk_bytes: What came from the disk; 0 where the page cache had it.
    """

    returned: Sample
    ready: Sample
    own_bytes: int
    extra_bytes: int
    extra_anonymous_bytes: int | None
    disk_bytes: int


class Reader:
    """One rank of one contender, which has read a small checkpoint already (lazy imports)."""

    def __init__(self, reader: str, warm_up: str) -> None:
        self.read = READERS[reader]
        self._forward(self.read(warm_up))

    def load(self, path: str, watch: bool) -> Load:
        """Read the checkpoint once."""
        models: list[Any] = []
        reset_peak()
        before, disk = memory_bytes("VmRSS"), _disk_bytes()
        with _Watch() if watch else _Unwatched() as anonymous:
            returned = timed(lambda: models.append(self.read(path)))
            first = timed(lambda: self._forward(models[0]))
        own = parameter_bytes(models[0])
        peak = memory_bytes("VmHWM") - before
        extra = anonymous.peak - own if watch else None
        ready = Sample(returned.cpu_s + first.cpu_s, returned.wall_s + first.wall_s)
        return Load(returned, ready, own, peak - own, extra, _disk_bytes() - disk)

    @staticmethod
    def _forward(model: Any) -> None:
        with torch.no_grad():
            model(torch.tensor([[1]]), use_cache=False)


class _Unwatched:
    peak = 0

    def __enter__(self) -> "_Unwatched":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Watch(_Unwatched):
    """Looks every few milliseconds at the memory that no file backs."""

    def __enter__(self) -> "_Watch":
        self._stop = threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        return memory_bytes("RssAnon") + memory_bytes("RssShmem")


def _disk_bytes() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)
    assert found is not None
    return int(found[1])


def page_cache(path: str, warm: bool) -> None:
    """Bring the checkpoint's files into the page cache, or out of it."""
    for file in Path(path).glob("*.safetensors"):
        with file.open("rb") as stream:
            if warm:
                while stream.read(1 << 24):
                    pass
            else:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(reader: str, folder: str, ranks: int, *, warm: bool, watch: bool) -> list[Load]:
    """Read the checkpoint once in new processes; what each rank says."""
    with Ranks(ranks, Reader, reader, f"{folder}/small") as group:
        page_cache(f"{folder}/model", warm)
        return group.ask("load", f"{folder}/model", watch)


HEAD = (
    "median (min–max)",
    "from_pretrained, wall s",
    "÷ transformers'",
    "processor seconds ÷ transformers'",
    "to the end of a first forward, wall s",
    "÷ transformers'",
    "own parameters, MB per rank",
    "peak memory beyond them, MB per rank",
    "of it not backed by files",
    "read from a cold disk, MB, all ranks",
)


def report(
    rounds: dict[str, list[list[Load]]], watched: dict[str, list[Load]], cold: dict[str, list[Load]]
) -> str:
    """One line per contender."""
    base = {what: _samples(rounds["transformers"], what) for what in ("returned", "ready")}
    rows = []
    for reader, loads in rounds.items():
        returned, ready = _samples(loads, "returned"), _samples(loads, "ready")
        numbers = (
            max(x.own_bytes for x in loads[0]),
            statistics.median(max(x.extra_bytes for x in group) for group in loads),
            max(x.extra_anonymous_bytes or 0 for x in watched[reader]),
            sum(x.disk_bytes for x in cold[reader]),
        )
        cells = [
            spread([sample.wall_s for sample in returned]),
            spread(ratios(returned, base["returned"], "wall_s")),
            spread(ratios(returned, base["returned"], "cpu_s")),
            spread([sample.wall_s for sample in ready]),
            spread(ratios(ready, base["ready"], "wall_s")),
        ]
        rows.append([reader, *cells, *(f"{number / 1e6:.0f}" for number in numbers)])
    return table(HEAD, rows)


def _samples(loads: list[list[Load]], what: str) -> list[Sample]:
    return [Sample.of_ranks([getattr(x, what) for x in group]) for group in loads]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--shard", default="250MB", help="size of one file of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the samples too; - is the output")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1")
    rounds: dict[str, list[list[Load]]] = {reader: [] for reader in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="benchmark-model-") as folder:
        config = llama_config(args.layers, args.hidden, args.vocab)
        size = write_checkpoint(Path(folder, "model"), config, torch.bfloat16, args.shard)
        write_checkpoint(Path(folder, "small"), llama_config(1, 64, 96), torch.bfloat16)
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            for reader in CONTENDERS:
                rounds[reader].append(load(reader, folder, args.ranks, warm=True, watch=False))
        watched, cold = (
            {r: load(r, folder, args.ranks, warm=warm, watch=warm) for r in CONTENDERS}
            for warm in (True, False)
        )
    if args.json:
        found = {"rounds": rounds, "watched": watched, "cold": cold}
        text = json.dumps({"checkpoint_bytes": size, **found}, indent=1, default=asdict)
        if args.json == "-":
            print(text)
            return
        Path(args.json).write_text(text)
    print(f"Checkpoint of {size / 1e6:.0f} MB in files of {args.shard}, {args.ranks} ranks\n")
    print(report(rounds, watched, cold))


if __name__ == "__main__":
    main()
