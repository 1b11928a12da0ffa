"""Groups of settings of an `Accelerator`, under the names that accelerate's users know."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError


@dataclass
class DataLoaderConfiguration:
    """How loaders deal out samples.

    Attributes:
        split_batches: The batch size is that of all data ranks together, not of each.
        even_batches: Always True: all ranks take every step; see the how-to on loaders.
        data_seed: Of the order of shuffled samples; None: the Accelerator's.
        non_blocking: Do not wait for copies to the device, which needs pinned memory.
        sharded: Iterable data sets give each data rank its own samples already.
    """

    split_batches: bool = False
    even_batches: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    sharded: bool = False


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: Micro-steps for each optimizer step.
        sync_with_dataloader: The end of a loader ends the window, complete or not.
        sync_each_batch: Reduce gradients over the data ranks in every micro-step: more
            communication, but no whole gradients in memory.
    """

    num_steps: int = 1
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Where things are written.

    Attributes:
        project_dir: For checkpoints and logs.
        logging_dir: For logs; None: `project_dir`.
        total_limit: Checkpoints that are kept.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    total_limit: int | None = None


INSTEAD = {
    "cpu": "CUDA_VISIBLE_DEVICES='' in the environment",
    "deepspeed_plugin": "plait.DistributedConfig(dp_shard_size=…)",
    "deepspeed_plugins": "plait.DistributedConfig(dp_shard_size=…)",
    "fsdp_plugin": "plait.DistributedConfig(dp_shard_size=…, fsdp_plan=…)",
    "torch_tp_plugin": "plait.DistributedConfig(tp_size=…)",
    "megatron_lm_plugin": "plait.DistributedConfig(tp_size=…)",
    "even_batches": "nothing: a data rank without a sample takes part with none",
    "rng_types": "nothing: samples are dealt out in one order on all ranks",
    "kwargs_handlers": "torch's own settings",
    "dynamo_backend": "torch.compile(model) after prepare",
    "dynamo_plugin": "torch.compile(model) after prepare",
}
"""Arguments of accelerate's that are not known here, and what does the same."""


def refuse(others: Mapping[str, Any]) -> None:
    """Refuse arguments that are not known.

    Raises:
        PlaitError: One of them asks for something.
    """
    asked = {name: value for name, value in others.items() if value not in (None, False)}
    if others.get("even_batches", True) is False:
        asked["even_batches"] = False
    if asked:
        raise PlaitError(
            f"Accelerator({', '.join(f'{name}=…' for name in asked)}):",
            [f"{name} is no argument of plait's Accelerator" for name in asked],
            [f"for {name}: {INSTEAD[name]}" for name in asked if name in INSTEAD],
        )


def taken(kind: Any, given: Any, asked: str, **values: Any) -> Any:
    """Settings of one kind, from an object with such attributes, or from single values.

    Args:
        kind: One of the classes of this module.
        given: One of them, or accelerate's class of this name; None: the defaults.
        asked: Name of the argument, for errors.
        **values: Single settings; those that are None are not meant.

    Raises:
        PlaitError: A setting is given twice, differently, or asks for what plait does not have.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    found = {name: getattr(given, name) for name in known if hasattr(given, name)}
    problems = []
    for name, value in values.items():
        if value is None:
            continue
        if given is not None and found.get(name) not in (None, value, _default(kind, name)):
            problems.append(f"{name} is {value!r}, and {found[name]!r} in {asked}")
        found[name] = value
    if given is not None and not isinstance(given, kind) and dataclasses.is_dataclass(given):
        for field in dataclasses.fields(given):
            default = field.default
            value = getattr(given, field.name)
            changed = default is not dataclasses.MISSING and value != default
            if changed and field.name not in known and field.name not in _HARMLESS:
                problems.append(f"{asked}.{field.name}={value!r} is not known here")
    if kind is DataLoaderConfiguration and found.get("even_batches") is False:
        problems.append("even_batches=False: ranks that end earlier would keep the others waiting")
    if problems:
        raise PlaitError(f"Accelerator({asked}=…):", problems, f"plait.train.{kind.__name__}(…)")
    return kind(**found)


_HARMLESS = ("use_seedable_sampler", "use_stateful_dataloader", "adjust_scheduler", "iteration")
"""Settings of accelerate that ask for what plait does anyway, or for nothing."""


def _default(kind: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)
