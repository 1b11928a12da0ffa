"""What a user asks for: how many ranks along each axis, and how.

Sizes are checked for type and range when a config is made, and against the number of processes
and the features that exist when it is resolved ([`resolve`][plait.layout.arithmetic.resolve]).
"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from plait.errors import LayoutError
from plait.layout import arithmetic, checks, serial
from plait.layout.axes import SIZE_FIELDS

SP_BACKENDS = ("ulysses", "deepspeed")
"""Names of the sequence-parallel backend. Both mean plait's own Ulysses attention."""

CP_BACKENDS = ("ring", "torch")
"""Names of the context-parallel backend. Both mean plait's own ring attention."""

ATTENTION_IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that work on a sequence split over ranks."""

PRECISIONS = ("bf16", "bfloat16", "fp16", "float16")
"""Names of the dtypes that sharded parameters can be computed in."""

EP_IMPLEMENTATIONS = ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe")
"""Ways of bringing tokens to their experts."""


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How sequences are split under sequence parallelism (Ulysses).

    `DeepSpeedSequenceParallelConfig` is the same class under the name that accelerate gives it.

    Args:
        sp_seq_length: Length of every sequence, for fixed-length data.
        sp_seq_length_is_variable: Whether lengths differ between batches.
        sp_attn_implementation: Attention run on each rank's heads; None keeps the model's own.

    Raises:
        LayoutError: A field has the wrong type or value; all of them are listed.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool = True
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        length, variable = self.sp_seq_length, self.sp_seq_length_is_variable
        problems = [
            None if length is None else checks.size("sp_seq_length", length),
            checks.switch("sp_seq_length_is_variable", variable),
        ]
        if length is None and variable is False:
            problems.append("sp_seq_length_is_variable=False needs a sp_seq_length")
        attention = self.sp_attn_implementation
        if attention == "eager":
            problems.append(
                "sp_attn_implementation='eager' cannot work on a split sequence: it builds the "
                f"whole mask; use one of {', '.join(ATTENTION_IMPLEMENTATIONS)}"
            )
        elif attention is not None:
            problems.append(
                checks.choice("sp_attn_implementation", attention, ATTENTION_IMPLEMENTATIONS)
            )
        _refuse(type(self).__name__, problems)


DeepSpeedSequenceParallelConfig = SequenceParallelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How many ranks lie along each axis of the device mesh.

    The product dp_replicate × dp_shard × cp × sp × tp must equal the number of processes. With all
    sizes 1, or without a launcher (one process), nothing is split.

    Args:
        dp_replicate_size: Copies of the model, each on its own part of the batch.
        dp_shard_size: Ranks that share one copy's parameters (FSDP).
        cp_size: Ranks that share a sequence by ring attention.
        sp_size: Ranks that share a sequence by exchanging heads (Ulysses).
        tp_size: Ranks that share every layer's weights. None: one, or all ranks the other sizes
            leave when a tensor-parallel plan is given.
        ep_size: Ranks that share the experts; a different view of the ranks above.
        cp_backend: "ring"; "torch" is accepted and means the same.
        cp_handler: Settings of context parallelism.
        sp_backend: "ulysses"; "deepspeed" is accepted and means the same.
        sp_handler: Settings of sequence parallelism.
        fsdp_size: Another name for `dp_shard_size`.

    None as a size means unset. Raises `LayoutError` listing every field with a wrong type or range.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    tp_size: int | None = None
    ep_size: int = 1
    cp_backend: str = "ring"
    cp_handler: Mapping[str, Any] | None = None
    sp_backend: str = "ulysses"
    sp_handler: SequenceParallelConfig | None = None
    if TYPE_CHECKING:
        fsdp_size: int | None = None
    else:
        fsdp_size: InitVar[int | None] = None

    def __post_init__(self, *alias: int | None) -> None:
        problems = self._take_alias(*alias)
        for name in SIZE_FIELDS:
            value = getattr(self, name)
            if value is None and name != "tp_size":
                object.__setattr__(self, name, 1)
            elif value is not None:
                problem = checks.size(name, value)
                problems.append(problem)
                object.__setattr__(self, name, value if problem else int(value))
        for name, default in (("cp_backend", "ring"), ("sp_backend", "ulysses")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        problems += [
            checks.choice("cp_backend", self.cp_backend, CP_BACKENDS),
            checks.choice("sp_backend", self.sp_backend, SP_BACKENDS),
            self._check_handler(),
            *self._check_further(),
        ]
        _refuse(type(self).__name__, problems)

    def _take_alias(self, fsdp_size: int | None = None) -> list[str | None]:
        if fsdp_size is None or isinstance(fsdp_size, _Alias):
            return []
        if self.dp_shard_size not in (None, 1, fsdp_size):
            return [
                f"fsdp_size={fsdp_size!r} and dp_shard_size={self.dp_shard_size!r} are two names "
                "of one size and differ"
            ]
        object.__setattr__(self, "dp_shard_size", fsdp_size)
        return []

    def _check_handler(self) -> str | None:
        handler = self.sp_handler
        if handler is None or isinstance(handler, SequenceParallelConfig):
            return None
        return f"sp_handler must be a SequenceParallelConfig, got {type(handler).__name__}"

    def _check_further(self) -> list[str | None]:
        return []

    def resolve(self, world_size: int | None) -> arithmetic.Layout:
        """The layout of this config on `world_size` processes.

        Args:
            world_size: Number of processes; None when there is no launcher.

        Raises:
            LayoutError: The sizes do not fit the processes, or a feature is not built.
        """
        return arithmetic.resolve(self, world_size)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data; `from_dict` makes an equal config of it."""
        return serial.to_dict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A config from plain data.

        Raises:
            LayoutError: A field is unknown (nearest names are suggested) or has a wrong value.
        """
        return serial.from_dict(cls, data)

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return serial.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A config from a JSON object."""
        return serial.from_dict(cls, serial.parse_json(text))

    def to_yaml(self) -> str:
        """The fields as YAML."""
        return serial.to_yaml(self)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """A config from YAML; also from the `parallelism_config:` block of an accelerate file."""
        return serial.from_dict(cls, serial.parse_yaml(text))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A config from a .json, .yaml or .yml file."""
        return serial.from_dict(cls, serial.read(path))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """A config from the PARALLELISM_CONFIG_* variables; unset ones keep their defaults.

        Args:
            environ: Where to read; None reads this process's environment.
        """
        from plait.layout import environment

        return serial.from_dict(cls, environment.settings(environ))


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(ParallelismConfig):
    """A [`ParallelismConfig`][plait.layout.config.ParallelismConfig] with plans and switches.

    Args:
        tp_plan: Tensor-parallel rules, pattern → style. None or "auto": the model's own plan,
            improved and completed by one derived from its structure. "model": its own plan as it
            stands. A dict overrides single rules and keeps the rest; an empty dict applies none.
        check_plan: Prove derived rules on a small copy of the model before their first use.
        ep_plan: Expert rules, likewise.
        fsdp_plan: Sharding rules, likewise.
        enable_sequence_parallel: Split activations along the sequence between tensor-parallel
            regions.
        fsdp_cpu_offload: Keep sharded parameters and optimizer state in host memory.
        fsdp_mixed_precision: Compute in a lower precision than the sharded parameters have: True or
            "bf16", or "fp16". Gradients are added in float32.
        ep_implementation: How tokens reach their experts: "auto", "all_to_all" or "all_reduce".
        consistency_guard: Check at every call of the model that the ranks do the same (True), or at
            every n-th (a number); see `plait.guard`.
    """

    tp_plan: Mapping[str, str] | str | None = None
    check_plan: bool = True
    ep_plan: Mapping[str, str] | str | None = None
    fsdp_plan: Mapping[str, str] | str | None = None
    enable_sequence_parallel: bool = False
    fsdp_cpu_offload: bool = False
    fsdp_mixed_precision: bool | str = False
    ep_implementation: str = "auto"
    consistency_guard: bool | int = False

    def _check_further(self) -> list[str | None]:
        problems: list[str | None] = []
        for name in ("tp_plan", "ep_plan", "fsdp_plan"):
            value = getattr(self, name)
            problems.append(checks.plan(name, value))
            if isinstance(value, Mapping):  # the caller's own dict may change later
                object.__setattr__(self, name, dict(value))
        for name in (
            "check_plan",
            "enable_sequence_parallel",
            "fsdp_cpu_offload",
        ):
            problems.append(checks.switch(name, getattr(self, name)))
        if self.fsdp_mixed_precision not in (True, False):
            problems.append(
                checks.choice("fsdp_mixed_precision", self.fsdp_mixed_precision, PRECISIONS)
            )
        problems.append(
            checks.choice("ep_implementation", self.ep_implementation, EP_IMPLEMENTATIONS)
        )
        if not isinstance(self.consistency_guard, bool):
            problems.append(checks.size("consistency_guard", self.consistency_guard))
        return problems


def refuse_other(config: object, asked: str) -> None:
    """Refuse what is given for a config and is none, such as another library's.

    Args:
        config: What was given; None stands for the default.
        asked: How it was given.

    Raises:
        LayoutError: It is no `ParallelismConfig`.
    """
    if config is not None and not isinstance(config, ParallelismConfig):
        kind = f"{type(config).__module__}.{type(config).__qualname__}".removeprefix("builtins.")
        raise LayoutError(
            f"{asked}={config!r}:",
            f"a {kind} is none of plait's configs",
            ["plait.DistributedConfig(tp_size=2)", "plait.DistributedConfig.from_dict({…})"],
        )


def _refuse(what: str, problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise LayoutError(f"{what}: {len(found)} field(s) cannot be used", found)


class _Alias(int):
    """An `fsdp_size` read from a config.

    `dataclasses.replace` hands it back to the constructor, where it must not count as a wish of
    the caller's: `replace(config, dp_shard_size=2)` means 2 whatever the size was.
    """


def _fsdp_size(self: ParallelismConfig) -> int:
    """Another name for `dp_shard_size`."""
    return _Alias(self.dp_shard_size)


# After the dataclass is made: in its body the property would be taken for the field's default.
ParallelismConfig.fsdp_size = property(_fsdp_size)  # type: ignore[assignment]
