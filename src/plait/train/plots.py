"""Pictures of a run from its log: loss, throughput, memory."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

PICTURES: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "loss": (
        "Loss",
        "mean over tokens",
        (("loss", "learned from"), ("eval_loss", "evaluation")),
    ),
    "throughput": ("Throughput", "tokens a second", (("tokens_per_s", "all ranks"),)),
    "memory": ("Memory", "GB, the fullest rank at its highest", (("memory_gb", "peak so far"),)),
}
"""By file name: title, label of the numbers, and (key in the log, name) of each line."""


def read(log: Path) -> list[Line]:
    """The lines of a JSONL log by step; of a step that was done twice, the last.

    A resumed run repeats the steps after its checkpoint. A last line that was cut off is left out.
    """
    found: dict[int, Line] = {}
    for text in log.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            step = line["step"]
            repeated = "loss" in line and "loss" in found.get(step, {})
            found[step] = line if repeated else {**found.get(step, {}), **line}
    return [found[step] for step in sorted(found)]


def draw(lines: Sequence[Line], directory: Path) -> list[Path]:
    """Writes a PNG file for each of `PICTURES` that has numbers.

    Args:
        lines: What `read` gave.
        directory: Where to.

    Returns:
        The files; none where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure

    written = []
    for name, (title, label, series) in PICTURES.items():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        drawn = 0
        for key, meaning in series:
            points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
            if points:
                mark = "o" if len(points) == 1 or key.startswith("eval") else ""
                axes.plot(*zip(*points, strict=True), marker=mark, label=meaning)
                drawn += 1
        if not drawn:
            continue
        axes.set_title(title)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name != "loss":
            axes.set_ylim(bottom=0)
        if drawn > 1:
            axes.legend(frameon=False)
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=110)
        written.append(path)
    return written
