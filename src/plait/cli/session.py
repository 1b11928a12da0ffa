"""A model ready to generate, on one rank of a command; and what it cost."""

import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.cli.options import ModelOptions
from plait.errors import PlanError


@dataclass(frozen=True)
class RankCosts:
    """What a command took on one rank.

    Attributes:
        rank: Global rank.
        read_bytes: Bytes of the checkpoint that this rank read.
        held_fraction: Parameter elements held here over all of the model's.
        peak_memory_bytes: Highest memory of the process, or of its device where that is CUDA.
        load_s: Seconds from the start of loading to a model ready to run.
        generate_s: Seconds inside `generate`.
    """

    rank: int
    read_bytes: int
    held_fraction: float
    peak_memory_bytes: int
    load_s: float
    generate_s: float


@dataclass
class Session:
    """One rank's model and tokenizer.

    Attributes:
        model: The model, split where there is more than one rank.
        tokenizer: Its tokenizer.
        rank: Global rank.
        mesh: The tensor-parallel axis, or `None` for a single rank.
        read_bytes: Bytes of the checkpoint that this rank read.
        load_s: Seconds that loading took.
        generate_s: Seconds inside `generate` so far.
    """

    model: Any
    tokenizer: Any
    rank: int
    mesh: Any
    read_bytes: int
    load_s: float
    generate_s: float = 0.0

    def say(
        self,
        messages: Sequence[dict[str, str]],
        settings: dict[str, Any],
        use_template: bool | None,
        write: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Generates the model's next turn.

        Args:
            messages: The turns so far.
            settings: Arguments of `generate`.
            use_template: As for `plait.hf.generation.text.encode`.
            write: Takes the text piece by piece (rank 0's only).

        Returns:
            The new tokens, the same on every rank.
        """
        from plait.hf.generation import text

        inputs = text.encode(self.tokenizer, messages, use_template, self.model.device)
        streamer = None
        if write is not None:
            streamer = text.streamer(self.tokenizer, write)
        start = time.perf_counter()
        tokens = text.generated(self.model, inputs, settings, streamer)
        self.generate_s += time.perf_counter() - start
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def share(self, content: Any) -> list[Any]:
        """Every rank's `content`, on every rank.

        Comm:
            One `comm.exchange`; none for a single rank.
        """
        if self.mesh is None:
            return [content]
        from plait import comm

        return comm.exchange(content, self.mesh)

    def costs(self) -> list[dict[str, Any]]:
        """`RankCosts` of every rank as dicts, on every rank.

        Comm:
            One `comm.exchange`.
        """
        from plait.state import held_fraction

        own = RankCosts(
            rank=self.rank,
            read_bytes=self.read_bytes,
            held_fraction=held_fraction(self.model),
            peak_memory_bytes=peak_memory_bytes(self.model.device),
            load_s=round(self.load_s, 3),
            generate_s=round(self.generate_s, 3),
        )
        return self.share(asdict(own))


def open_session(options: ModelOptions) -> Session:
    """Loads the model and its tokenizer on this rank.

    Raises:
        PlaitError: Of any kind, as `AutoModelForCausalLM.from_pretrained`.
    """
    rules = read_plan(options.plan) if options.plan is not None else None
    import torch

    import plait
    from plait.hf.generation import text
    from plait.run import environment, process_group

    logging.getLogger("plait").setLevel(logging.DEBUG if options.debug else logging.WARNING)
    if not options.debug:
        text.silence()
    device = process_group.ensure(options.device)
    start = time.perf_counter()
    tokenizer = text.load_tokenizer(options.model)
    model = plait.AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype),
        distributed_config=plait.DistributedConfig(tp_size=options.tp, tp_plan=rules),
    )
    model = model.to(device).eval()
    state = vars(model).get("_plait")
    report = vars(model).get("_plait_report")
    if options.adapter is not None:
        from plait.hf.peft.reading import with_adapter

        with_adapter(model, options.adapter)
    return Session(
        model=model,
        tokenizer=tokenizer,
        rank=environment.world().rank,
        mesh=None if state is None else state.tp_mesh,
        read_bytes=report.bytes_read if report is not None else _checkpoint_bytes(options.model),
        load_s=time.perf_counter() - start,
    )


def read_plan(path: Path) -> dict[str, str]:
    """The rules of a plan file.

    Raises:
        PlanError: It isn't a YAML mapping of texts.
    """
    import yaml

    asked = f"The plan file {path.name}."
    hint = "write one rule a line, such as `model.layers.*.mlp.down_proj: rowwise`"
    try:
        rules = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(asked, f"it is not YAML: {error}", hint) from None
    if not isinstance(rules, dict) or not all(
        isinstance(item, str) for pair in rules.items() for item in pair
    ):
        raise PlanError(asked, "it is not a mapping of name patterns to styles", hint)
    return rules


def peak_memory_bytes(device: Any) -> int:
    """The highest memory so far: of a CUDA device, else of this process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _checkpoint_bytes(path: str) -> int:
    """The size of the weight files of a model that one process reads; 0 for one from the hub."""
    place = Path(path)
    if place.is_file():
        return place.stat().st_size
    return sum(file.stat().st_size for file in place.glob("*.safetensors")) if place.exists() else 0
