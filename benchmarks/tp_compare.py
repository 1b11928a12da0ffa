"""Tensor parallelism of plait beside transformers' own and torch's, in one run, A B C, A B C.

    python benchmarks/tp_compare.py                         # the full set, some minutes
    python benchmarks/tp_compare.py --only decode --rounds 3
    python benchmarks/tp_compare.py --layers 2 --hidden 256 --json -

What is measured and how: benchmarks/README.md.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import READERS, llama_config, parameter_bytes, torch_tp, write_checkpoint

from ranks import Ranks, Sample, memory_bytes, ratios, reset_peak, spread, table, timed, trim

PROMPT = 16
PHASES = {
    "forward": "forward 1 × {s}, all logits",
    "prefill": "prefill 1 × {s}, last logits",
    "decode": "decode, per token, forward steps",
    "generate": "decode, per token, `generate()`",
    "train": "training step 2 × {half}",
    "fused": "the same with `AdamW(fused=True)`",
}
TRAINING = ("train", "fused")
REPEATS = {"forward": 2, "prefill": 2}


@dataclass(frozen=True)
class Sizes:
    """The model, its input, and how often it is measured."""

    layers: int = 8
    hidden: int = 1024
    vocab: int = 32_000
    sequence: int = 512
    tokens: int = 32


@dataclass(frozen=True)
class Column:
    """One contender: which processes, and what they do there."""

    title: str
    reader: str
    loss_parallel: bool = False
    threads: int = 1
    phases: tuple[str, ...] = tuple(PHASES)


# The peers leave some parameters plain tensors, and a fused optimizer refuses the mixture.
NOT_FUSED = tuple(phase for phase in PHASES if phase != "fused")
BASE = Column("one process", "one")
COLUMNS = (
    Column("plait", "plait"),
    Column("transformers", "transformers", phases=NOT_FUSED),
    Column("torch `parallelize_module`", "torch", phases=NOT_FUSED),
    Column("torch with `loss_parallel`", "torch", loss_parallel=True, phases=("train",)),
    Column("floor: no communication", "floor"),
    Column("one process, 2 threads", "one", threads=2),
)


class Subject:
    """One rank's part of one contender, and the work it is timed at."""

    def __init__(self, reader: str, path: str, sizes: Sizes, training: bool) -> None:
        split_logits = training and reader == "torch"
        self.model = torch_tp(path, "split") if split_logits else READERS[reader](path)
        self.model.train(training)
        self.sizes, self.split_logits = sizes, split_logits
        generator = torch.Generator().manual_seed(1)
        shape = (2, sizes.sequence // 2) if training else (1, sizes.sequence)
        self.ids = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        self.optimizer: torch.optim.Optimizer | None = None
        trim()

    def time(self, phase: str, column: Column) -> Sample:
        """One measurement."""
        torch.set_num_threads(column.threads)
        with self._mode(phase):
            work = getattr(self, phase)(column)
            sample = timed(work, REPEATS.get(phase, 1))
        torch.set_num_threads(1)
        per = self._per(phase)
        return Sample(sample.cpu_s / per, sample.wall_s / per)

    def result(self, phase: str, column: Column) -> list[float]:
        """A few numbers that all contenders must agree on; also warms up."""
        with self._mode(phase):
            out = getattr(self, phase)(column)()
        return [float(x) for x in torch.as_tensor(out).flatten()[: self.sizes.tokens]]

    def collectives(self, phase: str, column: Column) -> list[tuple[float, float]]:
        """Calls and bytes acted on: of the forward, and of forward and backward together."""
        from plait.comm import count

        with self._mode(phase):
            work = getattr(self, phase)(column)
            with count() as c:
                work()
        per = self._per(phase)
        return [(sum(t.values()) / per, sum(t.bytes.values()) / per) for t in (c.forward, c)]

    def peak_bytes(self, phase: str, column: Column) -> int:
        """Peak resident memory of this rank's process while it does the work once."""
        work = getattr(self, phase)(column)
        reset_peak()
        work()
        return memory_bytes("VmHWM")

    def parameter_bytes(self) -> int:
        """Bytes of the parameters that this rank holds."""
        return parameter_bytes(self.model)

    def _per(self, phase: str) -> int:
        return self.sizes.tokens if phase in ("decode", "generate") else 1

    @contextmanager
    def _mode(self, phase: str) -> Iterator[None]:
        with nullcontext() if phase in TRAINING else torch.no_grad():
            yield

    # ---- the phases: each prepares, and returns what is timed ---------------------------------
    def forward(self, column: Column) -> Callable[[], Any]:
        return lambda: self.model(self.ids, use_cache=False).logits[0, -1]

    def prefill(self, column: Column) -> Callable[[], Any]:
        return lambda: self.model(self.ids, use_cache=True, logits_to_keep=1).logits[0, -1]

    def decode(self, column: Column) -> Callable[[], Any]:
        """Greedy steps through the model's forward, after a cached prompt; to be done once."""
        prompt = self.ids[:, :PROMPT]
        first = self.model(prompt, use_cache=True, logits_to_keep=1)
        cache, start = first.past_key_values, first.logits[:, -1].argmax(-1, keepdim=True)

        def steps() -> list[int]:
            token, tokens = start, []
            for _ in range(self.sizes.tokens):
                logits = self.model(token, past_key_values=cache, use_cache=True).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(token))
            return tokens

        return steps

    def generate(self, column: Column) -> Callable[[], Any]:
        """transformers' generate, prefill of the prompt included."""
        prompt = self.ids[:, :PROMPT]
        work = partial(self.model.generate, prompt, attention_mask=torch.ones_like(prompt))
        n = self.sizes.tokens
        return lambda: work(max_new_tokens=n, do_sample=False)[0, PROMPT:]

    def train(self, column: Column) -> Callable[[], Any]:
        """Forward, loss, backward, optimizer step."""
        return self._training_step(column, fused=None)

    def fused(self, column: Column) -> Callable[[], Any]:
        """The same with one kernel for the whole optimizer."""
        return self._training_step(column, fused=True)

    def _training_step(self, column: Column, fused: bool | None) -> Callable[[], Any]:
        from torch.distributed.tensor.parallel import loss_parallel

        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        optimizer = self.optimizer

        def step() -> float:
            with loss_parallel() if column.loss_parallel else nullcontext():
                loss = self._loss(column)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

        return step

    def _loss(self, column: Column) -> torch.Tensor:
        if not self.split_logits:
            return self.model(self.ids, labels=self.ids, use_cache=False).loss
        logits = self.model(self.ids, use_cache=False).logits
        if not column.loss_parallel:  # what a head with whole output does
            from torch.distributed.tensor import Replicate

            logits = logits.redistribute(placements=[Replicate()]).to_local()
            return self.model.loss_function(logits, self.ids, self.sizes.vocab)
        labels = F.pad(self.ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@dataclass
class Results:
    """Everything measured: by phase and column title."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    collectives: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)


def measure(
    path: str, sizes: Sizes, phases: list[str], readers: list[str], rounds: int, ranks: int
) -> Results:
    """Phases without gradients share their processes; each training phase has new ones."""
    results = Results()
    stages = [[p for p in phases if p not in TRAINING], *([p] for p in phases if p in TRAINING)]
    for stage in filter(None, stages):
        needed = {c.reader for c in (BASE, *COLUMNS) if set(c.phases) & set(stage)}
        with ExitStack() as stack:
            groups = {}
            for reader in (r for r in readers if r in needed):
                size = 1 if reader == BASE.reader else ranks
                group = Ranks(size, Subject, reader, path, sizes, stage[0] in TRAINING)
                groups[reader] = stack.enter_context(group)
            for phase in stage:
                _measure_phase(phase, groups, rounds, results)
            for reader, group in groups.items():
                results.parameter_bytes[reader] = max(group.ask("parameter_bytes"))
    return results


def _measure_phase(phase: str, groups: dict[str, Ranks], rounds: int, results: Results) -> None:
    columns = [c for c in (BASE, *COLUMNS) if phase in c.phases and c.reader in groups]
    # The contenders of one group share their weights, so in training only the first steps of each
    # group start from the same ones.
    firsts = {c.reader: c for c in reversed(columns)}
    for _ in range(2):
        results_of = {r: groups[r].ask("result", phase, c) for r, c in firsts.items()}
        for reader, answers in results_of.items():
            for rank, found in enumerate(answers if reader != "floor" else []):
                _check(f"{phase}: {reader}, rank {rank}", found, results_of["one"][0], phase)
    talks = results.collectives[phase] = {}
    peaks = results.peak_bytes[phase] = {}
    samples = results.samples[phase] = {c.title: [] for c in columns}
    for column in columns:
        group = groups[column.reader]
        if column.reader not in ("one", "floor"):
            talks[column.title] = group.ask("collectives", phase, column)[0]
        if phase in TRAINING and column.threads == 1:
            group.ask("time", phase, column)  # the optimizer's state is there from now on
            peaks[column.title] = max(group.ask("peak_bytes", phase, column))
    for number in range(rounds):
        print(f"{phase}: round {number + 1} of {rounds}", file=sys.stderr)
        for column in columns:
            answers = groups[column.reader].ask("time", phase, column)
            samples[column.title].append(Sample.of_ranks(answers))


def _check(what: str, found: list[float], expected: list[float], phase: str) -> None:
    """A contender that computes something else is not compared."""
    tolerance = 0.0 if phase in ("decode", "generate") else 2e-4
    worst = max(abs(a - b) for a, b in itertools.zip_longest(found, expected, fillvalue=1e9))
    if worst > tolerance:
        raise SystemExit(f"{what} differs from one process by {worst:.2e}: {found} / {expected}")


# ---- the report -------------------------------------------------------------------------------
def report(results: Results, sizes: Sizes, ranks: int) -> str:
    """The table of the README: ratios to one process of one thread, in the same round."""
    rows = []
    for phase, samples in results.samples.items():
        title = PHASES[phase].format(s=sizes.sequence, half=sizes.sequence // 2)
        base, peer = samples[BASE.title], samples.get("transformers")
        talks = results.collectives[phase]
        rows += [
            _row(f"{title}: processor seconds ÷ one process's", _ratios(samples, base, "cpu_s")),
            _row("… wall ÷ one process's", _ratios(samples, base, "wall_s")),
            _row("… wall ÷ transformers'", _ratios(samples, peer, "wall_s")),
            _row(
                f"… wall, ms (one process: {_middle_ms(base):.1f})",
                {name: f"{_middle_ms(found):.1f}" for name, found in samples.items()},
            ),
            _row("… collectives forward: calls, MB", _talks(talks, 0)),
        ]
        if phase in TRAINING:
            rows.append(_row("… collectives forward + backward: calls, MB", _talks(talks, 1)))
            peaks = {name: f"{peak / 1e6:.0f}" for name, peak in results.peak_bytes[phase].items()}
            title = f"… peak memory, MB per rank (one process: {peaks[BASE.title]})"
            rows.append(_row(title, peaks))
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    return table([f"{ranks} ranks, median (min–max)", *(c.title for c in COLUMNS)], rows)


def _row(title: str, cells: dict[str, str]) -> list[str]:
    return [title, *(cells.get(column.title, "–") for column in COLUMNS)]


def _ratios(
    samples: dict[str, list[Sample]], base: list[Sample] | None, what: str
) -> dict[str, str]:
    if base is None:
        return {}
    return {name: spread(ratios(found, base, what)) for name, found in samples.items()}


def _middle_ms(samples: list[Sample]) -> float:
    return 1e3 * statistics.median(s.wall_s for s in samples)


def _talks(talks: dict[str, list[tuple[float, float]]], part: int) -> dict[str, str]:
    return {name: f"{t[part][0]:g}, {t[part][1] / 1e6:.1f}" for name, t in talks.items()}


def write_models(path: str, sizes: Sizes, ranks: int) -> None:
    """The checkpoint of all contenders, and that of the floor inside it."""
    whole = llama_config(sizes.layers, sizes.hidden, sizes.vocab)
    part = llama_config(sizes.layers, sizes.hidden, sizes.vocab, parts=ranks)
    write_checkpoint(Path(path), whole, torch.float32)
    write_checkpoint(Path(path, "floor"), part, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument("--json", metavar="FILE", help="write the samples too; - is the output")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="1")
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    with tempfile.TemporaryDirectory(prefix="benchmark-model-") as path:
        write_models(path, sizes, args.ranks)
        results = measure(path, sizes, args.only, args.readers, args.rounds, args.ranks)
    text = json.dumps({"sizes": asdict(sizes), "ranks": args.ranks, **asdict(results)}, indent=1)
    if args.json == "-":
        print(text)
        return
    if args.json:
        Path(args.json).write_text(text)
    print(report(results, sizes, args.ranks))


if __name__ == "__main__":
    main()
