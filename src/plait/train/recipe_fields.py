"""The keys of a recipe: their defaults, what they may be, and what they mean.

A value from YAML or a flag is brought into the key's form by its check, which either returns it or
raises `ValueError` with what is wrong in words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("cosine", "linear", "constant")
PACKINGS = ("auto", "cut", "whole", "none")
LOSSES = ("answers", "all")
TEXT_UNITS = ("file", "paragraph", "line")
DTYPES = ("float32", "bfloat16", "float16", "float64")
PRECISIONS = ("auto", "no", "bf16", "fp16")
FIELDS = ("text", "prompt", "completion", "messages")
TRACKERS = ("tensorboard", "wandb")

Check = Callable[[Any], Any]


def told(check: Check, meaning: str) -> dict[str, Any]:
    """What is known about a key besides its default."""
    return {"check": check, "meaning": meaning}


def setting(check: Check, meaning: str, default: Any = None) -> Any:
    """A key of a recipe."""
    return field(default=default, metadata=told(check, meaning))


def whole(least: int) -> Check:
    """An integer that is not below `least`."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"must be a whole number of at least {least}, got {value!r}")
        return value

    return check


def number(least: float, above: bool = False, below: float | None = None) -> Check:
    """A number from `least`, or above it, and below `below`.

    YAML reads `1e-4` as a text; it counts as the number that it spells.
    """

    def check(value: Any) -> float:
        try:
            found = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = float("nan")
        fits = found > least if above else found >= least
        if not fits or found == float("inf") or (below is not None and found >= below):
            wanted = f"above {least:g}" if above else f"of at least {least:g}"
            wanted += "" if below is None else f" and below {below:g}"
            raise ValueError(f"must be a number {wanted}, got {value!r}")
        return found

    return check


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, got {value!r}")
    return value


def one_of(*allowed: str) -> Check:
    """One of a few words. YAML reads a bare `no` as false."""

    def check(value: Any) -> str:
        word = "no" if value is False else value
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got {value!r}")
        return str(word)

    return check


def optional(check: Check) -> Check:
    """What `check` allows, or nothing."""
    return lambda value: None if value is None else check(value)


def paths(value: Any) -> tuple[str, ...]:
    """One path or a list of them."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(x, str) and x for x in found):
        raise ValueError(f"must be a path or a list of paths, got {value!r}")
    return tuple(found)


def names(value: Any) -> tuple[str, ...]:
    """One name or a list of them."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(map(_is_name, found)):
        raise ValueError(f"must be a name or a list of names, got {value!r}")
    return tuple(found)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def share_or_paths(value: Any) -> float | tuple[str, ...]:
    """A share between 0 and 1, or paths."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(number(0, above=True, below=1)(value))
    return paths(value)


def words(*allowed: str) -> Check:
    """A list of some of a few words, or one of them."""

    def check(value: Any) -> tuple[str, ...]:
        found = (value,) if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or any(word not in allowed for word in found):
            raise ValueError(f"must be a list of {', '.join(allowed)}, got {value!r}")
        return tuple(found)

    return check


def renamed(value: Any) -> dict[str, str]:
    """A mapping from plait's names of fields to those in the files."""
    if (
        not isinstance(value, Mapping)
        or not all(isinstance(column, str) for column in value.values())
        or not set(value) <= set(FIELDS)
    ):
        raise ValueError(f"must map some of {', '.join(FIELDS)} to names of fields, got {value!r}")
    return dict(value)


def plan(value: Any) -> str | dict[str, str]:
    """The words "auto" or "model", or a mapping from name pattern to style."""
    if value in ("auto", "model"):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(x, str) for p in value.items() for x in p):
        return dict(value)
    raise ValueError(f"must be auto, model or a mapping of name pattern to style, got {value!r}")


def betas(value: Any) -> tuple[float, float]:
    """AdamW's two decay rates."""
    rate = number(0, below=1)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"must be two numbers, got {value!r}")
    return (rate(value[0]), rate(value[1]))


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is learned: files, and how they become rows of tokens."""

    train: tuple[str, ...] = setting(paths, "files, folders or patterns to learn from", ())
    eval: float | tuple[str, ...] | None = setting(
        optional(share_or_paths), "share of the documents, or files, kept for evaluation"
    )
    seq_length: int = setting(whole(2), "tokens in a row", 1024)
    packing: str = setting(
        one_of(*PACKINGS),
        "how documents fill rows: cut (on and on), whole (in one piece each), none (one a row, "
        "padded); auto: whole where prompts are masked, else cut",
        "auto",
    )
    learn: str = setting(
        one_of(*LOSSES), "of prompts and chats: the answers alone, or all tokens", "answers"
    )
    fields: dict[str, str] = field(
        default_factory=dict, metadata=told(renamed, "other names of the fields in the files")
    )
    text_unit: str = setting(
        one_of(*TEXT_UNITS), "what one document is in a text file: file, paragraph, line", "file"
    )
    end_token: bool = setting(switch, "end each document with the tokenizer's end token", True)
    shuffle: bool = setting(switch, "mix the documents, and the rows anew in each epoch", True)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks there are, and what each has."""

    tp: int = setting(whole(1), "ranks that share every layer's weights", 1)
    dp_shard: int = setting(whole(1), "ranks that share parameters and see other rows (FSDP)", 1)
    dp_replicate: int = setting(whole(1), "copies of all that, on other rows (HSDP)", 1)
    tp_plan: str | dict[str, str] = setting(  # noqa: RUF009 (the default is a text)
        plan, "auto, model, or rules of your own", "auto"
    )
    sequence_parallel: bool = setting(
        switch, "split norms and residuals along the sequence between the tp layers", False
    )
    cpu_offload: bool = setting(
        switch, "keep sharded parameters and optimizer state in host memory", False
    )

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.dp_shard * self.dp_replicate

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.tp * self.num_data_ranks


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at once, and in which precision."""

    epochs: float = setting(number(0, above=True), "passes over the rows", 1.0)
    steps: int | None = setting(optional(whole(1)), "optimizer steps; they decide, if given")
    batch_size: int = setting(whole(1), "rows at a time, on each data rank", 1)
    accumulate: int = setting(whole(1), "batches of each data rank in one optimizer step", 1)
    dtype: str = setting(one_of(*DTYPES), "dtype of parameters and optimizer state", "float32")
    mixed_precision: str = setting(
        one_of(*PRECISIONS), "dtype of the arithmetic; auto: bf16 on GPUs that have it", "auto"
    )
    gradient_checkpointing: bool = setting(
        switch, "compute activations again in the backward instead of keeping them", False
    )
    attention: str | None = setting(
        optional(one_of("sdpa", "eager", "flex_attention")), "attention of the model"
    )
    seed: int = setting(whole(0), "of the order of the rows, of dropout, of new weights", 0)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and the course of its learning rate."""

    lr: float = setting(number(0), "highest learning rate", 2e-5)
    schedule: str = setting(one_of(*SCHEDULES), "what comes after the warm-up", "cosine")
    warmup: float = setting(
        number(0), "steps from 0 to the highest rate; below 1: a share of all steps", 0.0
    )
    final_lr: float = setting(number(0), "last learning rate, as a share of the highest", 0.0)
    weight_decay: float = setting(number(0), "not on biases and norms", 0.0)
    betas: tuple[float, float] = setting(betas, "AdamW's", (0.9, 0.999))
    eps: float = setting(number(0, above=True), "AdamW's", 1e-8)
    clip_norm: float = setting(number(0), "largest norm of the gradients; 0: any", 1.0)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of PEFT that are trained in the place of all weights; without `r`, none."""

    r: int = setting(whole(0), "rank of the adapters; 0: all weights are trained", 0)
    alpha: float | None = setting(
        optional(number(0, above=True)), "their scale is alpha ÷ r; null: twice the rank"
    )
    dropout: float = setting(number(0, below=1), "share of an adapter's input that is dropped", 0.0)
    targets: tuple[str, ...] = setting(
        names, "layers that get one; all-linear: every linear layer but the head", ("all-linear",)
    )
    dora: bool = setting(switch, "learn magnitudes too (DoRA)", False)
    rslora: bool = setting(switch, "scale by the root of the rank", False)


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What is measured and kept on the way."""

    log_every: int = setting(whole(1), "steps between two lines of the log", 1)
    eval_every: int = setting(whole(0), "steps between two evaluations; 0: at the end", 0)
    save_every: int = setting(whole(0), "steps between two checkpoints; 0: none but on Ctrl-C", 0)
    keep: int = setting(whole(1), "checkpoints that are kept", 2)
    plots: bool = setting(switch, "draw PNG files of loss, throughput and memory", True)
    trackers: tuple[str, ...] = setting(
        words(*TRACKERS), "besides the JSONL log: tensorboard, wandb", ()
    )
