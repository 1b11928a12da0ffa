"""What `plait check` and `plait verify` have in common: their options, ranks and verdict."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import options, ranks
from plait.errors import PlaitError
from plait.run import environment

EQUAL, DIFFERENT, NO_VERDICT = 0, 1, 2
"""Exit codes."""

PLAN_WORDS = ("auto", "model")

Model = Annotated[
    str,
    typer.Argument(help="Directory, config file, GGUF file, or name on the hub.", metavar="MODEL"),
]
NumRanks = Annotated[int, typer.Option("--tp", min=2, help="Number of ranks to split it over.")]
Plan = Annotated[
    str | None,
    typer.Option(
        "--tp-plan",
        help="YAML or JSON file of rules, name pattern: style; or auto, or model.",
        show_default="as parallelize chooses",
    ),
]
Sequence = Annotated[
    bool,
    typer.Option(
        "--enable-sequence-parallel", help="Split activations along the sequence as well."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
ReportTo = Annotated[Path | None, typer.Option(hidden=True, help="For the ranks of this command.")]

KINDS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModel",
)
"""Auto classes, in the order in which a config without `architectures` is read."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks have found.

    Attributes:
        model: What was compared, in words.
        plan: Name pattern → style, of the rules that were applied.
        held: Parameter elements of each rank over all of the model's.
        report: The comparison, as `Report.to_dict` gives it.
    """

    model: str
    plan: dict[str, str]
    held: list[float]
    report: dict[str, Any]


def decide(
    ctx: typer.Context,
    tp: int,
    report_to: Path | None,
    *,
    debug: bool,
    as_json: bool,
    work: Callable[[], Verdict],
) -> None:
    """Runs `work` on `tp` ranks, prints the verdict, and exits with it.

    Args:
        ctx: The command's context, which knows whether a parent prints.
        tp: Number of ranks.
        report_to: Where a rank leaves the verdict for its parent.
        debug: Show tracebacks and logs.
        as_json: Print JSON instead of a table.
        work: What each rank does.

    Raises:
        typer.Exit: Always.
    """
    with no_verdict(debug, ctx.obj == options.PARENT_PRINTS):
        if ranks.needs_ranks(tp):
            verdict = _of_own_ranks(tp, debug)
        else:
            verdict = work()
    world = environment.world()
    if report_to is not None:
        if world.rank == 0:
            report_to.write_text(json.dumps(asdict(verdict)))
        raise typer.Exit(EQUAL)  # that it differs is no failure of the rank
    if world.rank == 0:
        _show(verdict, as_json)
    raise typer.Exit(EQUAL if verdict.report["ok"] else DIFFERENT)


@contextlib.contextmanager
def no_verdict(debug: bool, parent_prints: bool = False) -> Iterator[None]:
    """As `ranks.reported`, with the exit code that says there is no verdict."""
    try:
        with ranks.reported(debug, parent_prints):
            yield
    except typer.Exit as left:
        raise typer.Exit(NO_VERDICT if left.exit_code == 1 else left.exit_code) from None


def _of_own_ranks(tp: int, debug: bool) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        file = Path(folder, "verdict.json")
        ranks.start([*sys.argv[1:], "--report-to", str(file)], tp, debug)
        return Verdict(**json.loads(file.read_text()))


def rules_of(chosen: str | None) -> dict[str, str] | str | None:
    """The `tp_plan` that an option means.

    Raises:
        PlanError: The file is no mapping of texts.
        typer.BadParameter: There is no such file.
    """
    if chosen is None or chosen in PLAN_WORDS:
        return chosen
    path = Path(os.path.expanduser(chosen))
    if not path.is_file():
        raise typer.BadParameter(
            f"there is no file {chosen!r}. Give a YAML or JSON file of rules, auto, or model.",
            param_hint="'--tp-plan'",
        )
    from plait.cli.session import read_plan

    try:
        return read_plan(path)  # JSON is YAML
    except PlaitError as error:
        raise typer.BadParameter(str(error), param_hint="'--tp-plan'") from None


def config_for(tp: int, tp_plan: str | None, enable_sequence_parallel: bool) -> Any:
    """The config that the options mean.

    Raises:
        PlanError: The file of rules is no mapping of texts.
        typer.BadParameter: There is no such file.
    """
    from plait import DistributedConfig

    return DistributedConfig(
        tp_size=tp,
        tp_plan=rules_of(tp_plan),
        enable_sequence_parallel=enable_sequence_parallel,
    )


def existing(model: str) -> str:
    """A model's path or name, with `~` expanded.

    Raises:
        typer.BadParameter: It looks like a path, and there is nothing.
    """
    path = os.path.expanduser(model)
    looks_local = path[:1] in "./" or path.endswith((".json", ".gguf"))
    if looks_local and not Path(path).exists():
        raise typer.BadParameter(
            f"there is no {model!r} here. Give a directory with config.json, a config file, a "
            ".gguf file, or a name on the hub.",
            param_hint="'MODEL'",
        )
    return path


def config_of(path: str, trust: bool) -> Any:
    """The config of a model; only rank 0's messages are of interest.

    Raises:
        WeightsError: There is none.
    """
    from plait.hf import gguf, skeleton

    if path.endswith(".gguf"):
        return gguf.gguf_config(path)
    return skeleton.read_config(path, {}, {"trust_remote_code": True} if trust else {})[0]


def class_of(config: Any, path: str, trust: bool) -> tuple[str, Any]:
    """The auto class that reads a model, and the model's own class.

    The class that the config names, or the first head that there is for it.

    Raises:
        PlaitError: transformers has no class for the config.
    """
    from plait import hf
    from plait.hf import skeleton

    named = (getattr(config, "architectures", None) or [None])[0]
    code = {"trust_remote_code": trust, "code_revision": None}
    found = []
    for kind in KINDS:
        made_by, _ = skeleton.model_class(hf.auto_class(kind), config, path, {}, code)
        if made_by is not None:
            found.append((kind, made_by))
    chosen = next((pair for pair in found if pair[1].__name__ == named), None)
    if chosen is None and not found:
        raise PlaitError(
            f"A model of the type {config.model_type!r}:",
            "none of the auto classes has a class for it",
            "--trust-remote-code, if its code comes with it",
        )
    return chosen or found[0]


def mesh_of(tp: int) -> Any:
    """The axis over all ranks, on the CPU."""
    from plait import DistributedConfig, build

    mesh = build.mesh_for(DistributedConfig(tp_size=tp), "cpu")
    assert mesh is not None
    return build.tp_axis(mesh)


def verdict_of(model: str, split: Any, report: Any, mesh: Any) -> Verdict:
    """The verdict on a comparison.

    Comm: one exchange of a control message.
    """
    from plait import comm
    from plait.state import held_fraction, state_of

    state = state_of(split)
    assert state is not None
    names = [n for n, _ in [*split.named_modules(), *split.named_parameters()]]
    plan = _collapsed({entry.name: entry.style for entry in state.plan.entries}, names)
    held = comm.exchange(round(held_fraction(split), 4), mesh)
    return Verdict(model, plan, held, report.to_dict())


def _collapsed(styles: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """Styles by name; under one pattern where every layer has a style, most of them this one."""
    from plait.plan.rules import generalize

    layers = Counter(generalize(name) for name in names)
    found: dict[str, dict[str, list[str]]] = {}
    for name, style in styles.items():
        found.setdefault(generalize(name), {}).setdefault(style, []).append(name)
    plan: dict[str, str] = {}
    for pattern, by_style in found.items():
        usual = max(by_style, key=lambda style: len(by_style[style]))
        if sum(map(len, by_style.values())) == layers[pattern]:
            plan[pattern] = usual
            del by_style[usual]
        plan.update((name, style) for style, group in by_style.items() for name in group)
    return plan


def quiet(debug: bool) -> None:
    """Keeps logs off the terminal."""
    import logging

    from plait.hf.generation import text

    logging.getLogger("plait").setLevel(logging.DEBUG if debug else logging.ERROR)
    if not debug:
        text.silence()


def _show(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        shown = {key: value for key, value in asdict(verdict).items() if key != "report"}
        print(json.dumps({**shown, **verdict.report}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    from plait.proof.report import Report

    report = Report.from_dict(verdict.report)
    # A pipe has no width: as wide as most names of modules need.
    console = Console(highlight=False, width=shutil.get_terminal_size((110, 24)).columns)
    console.print(f"{verdict.model}, on {report.num_ranks} ranks in {report.dtype}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plan")
    table.add_column("style")
    for pattern, style in verdict.plan.items():
        table.add_row(pattern, style)
    console.print(table)
    console.print()
    counts = Counter(f"{fraction:.0%}" for fraction in verdict.held)
    console.print(f"each rank holds {' or '.join(counts)} of the parameters\n")
    console.print(report.table())
    console.print()
    console.print(report.summary(), style="green" if report.ok else "bold red", markup=False)
    wrong = [row for row in report.wrong if row.kind == "error"]
    for row in wrong:
        console.print(row.note, markup=False)
