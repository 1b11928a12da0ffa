"""How much faster one forward pass is on more ranks: a picture, batch size by batch size.

    python benchmarks/tp_speedup.py --tp 1 2 4 --out tp_speedup.png
    torchrun --nproc-per-node 8 benchmarks/tp_speedup.py --hidden 4096 --dtype bfloat16

It starts its own ranks, as many as the largest `--tp`, or uses those of torchrun. On CUDA, where
there are devices, one per rank; else on the CPU, each rank with `--threads` threads.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from peers import llama_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from plait import parallelize
from plait.run import environment, process_group
from plait.testing import run_ranks


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    tp_sizes: list[int]
    batch_sizes: list[int]
    sequence: int
    layers: int
    hidden: int
    vocab: int
    dtype: str
    rounds: int
    threads: int


@dataclass(frozen=True)
class Point:
    """The forward passes of one batch size on one number of ranks: wall seconds, by round."""

    tp_size: int
    batch_size: int
    seconds: list[float]


def measure(setting: Setting) -> tuple[str, list[Point]]:
    """On every rank: one model per tp size on the first ranks, in turn; the other ranks wait."""
    torch.set_num_threads(setting.threads)
    device = process_group.ensure()
    meshes = {n: DeviceMesh(device.type, list(range(n))) for n in setting.tp_sizes}
    mine = {n: mesh for n, mesh in meshes.items() if dist.get_rank() < n}
    models = {n: _model(setting, device, mesh) for n, mesh in mine.items()}
    points = [Point(n, batch, []) for batch in setting.batch_sizes for n in setting.tp_sizes]
    for number in range(setting.rounds + 1):
        for point in points:
            if point.tp_size in mine:
                shape = (point.batch_size, setting.sequence)
                ids = torch.ones(shape, dtype=torch.long, device=device)
                seconds = _seconds(models[point.tp_size], ids, mine[point.tp_size])
                if number > 0:  # the first round warms up
                    point.seconds.append(seconds)
            dist.barrier()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return name, points


def _model(setting: Setting, device: torch.device, mesh: DeviceMesh) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = llama_config(setting.layers, setting.hidden, setting.vocab)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype))
    model = model.eval().to(device)
    return parallelize(model, device_mesh=mesh) if mesh.size() > 1 else model


@torch.no_grad()
def _seconds(model: nn.Module, ids: Tensor, mesh: DeviceMesh) -> float:
    """One forward pass, last logits only: from when all ranks are there until the last is done."""
    elapsed = torch.zeros(1, dtype=torch.float64, device=ids.device)
    dist.all_reduce(elapsed, group=mesh.get_group())
    _synchronize(ids.device)
    start = time.perf_counter()
    model(ids, use_cache=False, logits_to_keep=1)
    _synchronize(ids.device)
    elapsed += time.perf_counter() - start
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=mesh.get_group())
    return float(elapsed)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speedups(points: list[Point]) -> dict[int, dict[int, tuple[float, float, float]]]:
    """Batch size → tp size → one rank's time ÷ this one's by round: median, least, greatest."""
    alone = {p.batch_size: p.seconds for p in points if p.tp_size == 1}
    found: dict[int, dict[int, tuple[float, float, float]]] = {}
    for point in points:
        base = alone[point.batch_size]
        ratios = [a / b for a, b in zip(base, point.seconds, strict=True)]
        line = found.setdefault(point.batch_size, {})
        line[point.tp_size] = (statistics.median(ratios), min(ratios), max(ratios))
    return found


def draw(points: list[Point], setting: Setting, device: str, file: Path) -> None:
    """The picture: speed-up against tp size, both axes logarithmic, with the ideal line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6), dpi=160, layout="constrained")
    sizes = setting.tp_sizes
    axes.plot(sizes, sizes, color="0.65", linestyle=(0, (4, 3)), linewidth=1.4)
    axes.annotate("ideal", (sizes[-1], sizes[-1]), (-6, -2), textcoords="offset points",
                  ha="right", va="bottom", color="0.45")  # fmt: skip
    lines = speedups(points)
    colors = pyplot.get_cmap("viridis")([i / max(len(lines), 2) for i in range(len(lines))])
    for color, (batch, line) in zip(colors, lines.items(), strict=True):
        middle, low, high = zip(*line.values(), strict=True)
        axes.fill_between(sizes, low, high, color=color, alpha=0.12, linewidth=0)
        axes.plot(sizes, middle, "o-", color=color, linewidth=2, markersize=5, label=f"{batch}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.set_yticks(sizes, [f"{n} ×" for n in sizes])
    axes.minorticks_off()
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tp_size (ranks)")
    axes.set_ylabel("speed-up of one forward pass")
    axes.legend(title="batch size", frameon=False, loc="upper left")
    axes.set_title(
        f"Llama {setting.layers} layers × {setting.hidden}, sequence {setting.sequence}, "
        f"{setting.dtype}, {device}",
        fontsize=10,
        color="0.3",
    )
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="tp sizes; 1 is added")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("tp_speedup.png"))
    parser.add_argument("--json", type=Path, help="write the times too")
    args = parser.parse_args()
    world = environment.world()
    most = world.world_size if world.launched else max(args.tp or [_devices()])
    sizes = args.tp or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    setting = Setting(
        tp_sizes=sorted({1, *sizes}),
        batch_sizes=args.batch,
        **{n: getattr(args, n) for n in Setting.__dataclass_fields__ if hasattr(args, n)},
    )
    if world.launched:
        device, points = measure(setting)
        if world.rank > 0:
            return
    else:
        device, points = run_ranks(measure, most, setting, timeout=3600, backend=None)[0]
    draw(points, setting, device, args.out)
    if args.json:
        found = {"setting": asdict(setting), "device": device, "points": list(map(asdict, points))}
        args.json.write_text(json.dumps(found, indent=1))
    for batch, line in speedups(points).items():
        cells = (f"tp {n}: {m:.2f} ({low:.2f}–{high:.2f})" for n, (m, low, high) in line.items())
        print(f"batch {batch}: " + ", ".join(cells))
    print(f"Picture: {args.out}")


def _devices() -> int:
    """CUDA devices, or processor cores where there are none."""
    return torch.cuda.device_count() or os.cpu_count() or 1


if __name__ == "__main__":
    main()
