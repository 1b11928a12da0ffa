"""What the verbs that run a model have in common: their options and the checks on them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

PARENT_PRINTS = "parent prints"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda")

ModelPath = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Directory, GGUF file, or name on the hub.", show_default=False
    ),
]
TpSize = Annotated[int, typer.Option("--tp", min=1, help="Number of ranks to split it over.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")]
DType = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy.", show_default="greedy"),
]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample from the k best tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the best tokens up to this mass.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.", show_default="random")]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--tp-plan",
        "--plan",
        help="YAML file of rules, name pattern: style.",
        exists=True,
        dir_okay=False,
    ),
]
Adapter = Annotated[
    str | None, typer.Option("--adapter", help="Directory of an adapter in PEFT's files.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and logs.")]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is split.

    Attributes:
        model: Directory, GGUF file, or name on the hub; a leading `~`, which the shell leaves in
            `--model=~/x`, is expanded here.
        tp: Number of ranks.
        dtype: Name of a dtype, or "auto" for the checkpoint's.
        device: "cpu", "cuda" or None for the default.
        plan: A YAML file of rules, or None for the model's own plan.
        debug: Show tracebacks and logs.
        adapter: Directory of an adapter in PEFT's files, or None.
    """

    model: str
    tp: int
    dtype: str
    device: str | None
    plan: Path | None
    debug: bool
    adapter: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.path.expanduser(self.model))

    def check_adapter(self) -> None:
        """Refuses a directory that holds no adapter, before ranks start.

        Raises:
            PlaitError: As `plait.hf.peft.reading.check_adapter`.
        """
        if self.adapter is not None:
            from plait.hf.peft.reading import check_adapter

            check_adapter(self.adapter)

    def check(self) -> None:
        """Refuses what no run could use.

        Raises:
            typer.BadParameter: Wrong usage, with a hint.
        """
        _one_of("--dtype", self.dtype, DTYPES)
        if self.device is not None:
            _one_of("--device", self.device, DEVICES)
        looks_local = self.model.endswith(".gguf") or self.model[:1] in "./~"
        if looks_local and not Path(self.model).exists():
            raise typer.BadParameter(
                f"there is no {self.model!r} here. Give a directory with config.json and weights, "
                "a .gguf file, or a name on the hub such as HuggingFaceTB/SmolLM2-135M-Instruct.",
                param_hint="'--model'",
            )


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. Without any of them: greedily.

    Attributes:
        temperature: 0 or None without the others is greedy.
        top_k: Sample from the k best; 0 from all.
        top_p: Sample from the best tokens up to this probability mass.
        seed: Seed of the random numbers, or None.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            typer.BadParameter: Wrong usage, with a hint.
        """
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise typer.BadParameter(
                f"{self.top_p} is not in (0, 1]; 1 samples from all tokens.", param_hint="'--top-p'"
            )
        given = [name for name in ("top_k", "top_p") if getattr(self, name) is not None]
        if self.temperature == 0 and given:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise typer.BadParameter(
                f"0 is greedy, so {names} would have no effect. Leave one of them out.",
                param_hint="'--temperature'",
            )

    def settings(self) -> dict[str, Any]:
        """The arguments of `generate` that they mean."""
        chosen = {
            name: value
            for name in ("temperature", "top_k", "top_p")
            if (value := getattr(self, name)) is not None
        }
        if not chosen or self.temperature == 0:
            # The model's own defaults for sampling would only cause warnings here.
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"do_sample": True, **chosen}


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(
            f"{value!r} is none of {', '.join(allowed)}.", param_hint=f"'{option}'"
        )
