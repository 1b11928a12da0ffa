"""What a Trainer is asked for that a split model does not do."""

from collections.abc import Iterator
from typing import Any

from plait import comm
from plait.errors import PlaitError
from plait.hf.trainer import sft
from plait.layout import factors
from plait.state import ParallelState

_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")


def check(args: Any, state: ParallelState, *, is_sft: bool = False) -> None:
    """Refuse arguments that contradict the layout of a split model.

    Args:
        args: `TrainingArguments`.
        state: How the model was split.
        is_sft: Whether they are TRL's `SFTConfig`.

    Raises:
        PlaitError: With everything that does, and with what differs between the ranks.

    Comm: one control message on each axis.
    """
    problems = [*_differences(args, state), *_problems(args, state)]
    if is_sft:
        problems += sft.problems(args)
    if not problems:
        return
    names = state.mesh.mesh_dim_names or ()
    layout = factors(dict(zip(names, state.mesh.shape, strict=True)))
    raise PlaitError(
        f"A Trainer for a model that is split over {layout}:",
        problems,
        [
            "leave out what is named: the model brings its layout along",
            "DistributedConfig(tp_size=…, dp_shard_size=…) of as many ranks as there are processes",
        ],
    )


_OF_THE_RANK = frozenset(
    {"local_rank", "output_dir", "logging_dir", "run_name", "device", "process_index"}
)
"""Arguments that may differ between the ranks."""


def _differences(args: Any, state: ParallelState) -> Iterator[str]:
    """What the ranks were given differently: each would train another way, or wait for ever."""
    mine = {name: repr(x) for name, x in args.to_dict().items() if name not in _OF_THE_RANK}
    told = [mine]
    for mesh in (state.tp_mesh, state.data_mesh):
        if mesh is not None and mesh.size() > 1:
            told = [x for row in comm.exchange(told, mesh) for x in row]
    for name in mine:
        values = list(dict.fromkeys(other.get(name, "nothing") for other in told))
        if len(values) > 1:
            yield f"the ranks have different {name}: {', '.join(values)}"


def _problems(args: Any, state: ParallelState) -> Iterator[str]:
    if state.sequences is not None:
        yield "cp_size or sp_size: its batches are not split along the sequence; use Accelerator"
    ranks = state.mesh.size()
    if args.world_size != ranks:
        yield f"it runs on {args.world_size} process(es), the model lies on {ranks} rank(s)"
    if args.fsdp:
        yield f"fsdp={args.fsdp!r} would shard it once more"
    if args.deepspeed:
        yield f"deepspeed={args.deepspeed!r} would shard it once more"
    if args.torch_compile:
        yield "torch_compile=True: split logits and checks of the ranks are not compiled"
    if args.use_liger_kernel:
        yield "use_liger_kernel=True: it exchanges forwards of layers that are split"
    if not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False: its losses are means over all ranks' tokens"
    if args.accelerator_config.dispatch_batches:
        yield "dispatch_batches=True: each data rank reads its own samples"
    if args.accelerator_config.split_batches:
        yield "split_batches=True: a batch size is that of one data rank"
    asked = args.parallelism_config
    if asked is not None:
        sizes = dict(zip(state.mesh.mesh_dim_names or (), state.mesh.shape, strict=True))
        for name in _SIZES:
            theirs, own = getattr(asked, name, None) or 1, sizes.get(name[: -len("_size")], 1)
            if theirs != own:
                yield f"parallelism_config has {name}={theirs}, the model {own}"
