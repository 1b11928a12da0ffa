"""Sequence parallelism around a model that has been split over its tensor-parallel ranks."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.build.names import names_of
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.sequence import SequencePlan, Stack, sequence_plan
from plait.styles.sequence import Tokens, wrap_block, wrap_owner, wrap_region
from plait.styles.sequence_params import sum_gradients, wrap_row


def is_asked(config: object) -> bool:
    """Whether a config asks for activations that are split along the sequence."""
    return bool(getattr(config, "enable_sequence_parallel", False))


def split_sequences(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> SequencePlan:
    """Split activations along the sequence between the tensor-parallel regions, in place.

    Args:
        module: A module whose parameters and borders are in place.
        plan: What it was split by.
        mesh: The axis `tp`.

    Returns:
        What was decided.

    Raises:
        PlanError: It has no list of blocks that are split. Nothing has been changed.

    Comm: none.
    """
    found = sequence_plan(names_of(module), plan)
    if not found.stacks:
        raise _no_blocks(module, found)
    modules = dict(module.named_modules())
    for stack in found.stacks:
        _install(modules, stack, mesh)
    wrap_owner(module, [])  # sees what the caller asks for before anybody below
    return found


def _install(modules: dict[str, nn.Module], stack: Stack, mesh: DeviceMesh) -> None:
    tokens = Tokens(stack.name, mesh)
    for name in stack.per_token:
        sum_gradients(modules[name], tokens)
    for name in stack.rows:
        wrap_row(modules[name], tokens)
    for region in stack.regions:
        wrap_region(modules[region.name], tokens, cuts_output=region.cuts_output)
    for name in stack.blocks:
        first, last = stack.blocks[0], stack.blocks[-1]
        wrap_block(modules[name], tokens, is_first=name == first, is_last=name == last)
    wrap_owner(modules[stack.owner], [tokens])


def _no_blocks(module: nn.Module, found: SequencePlan) -> PlanError:
    left = [f"{name}: {why}" for name, why in found.whole.items()]
    return PlanError(
        f"enable_sequence_parallel=True for {type(module).__name__}:",
        ["no list of blocks in it holds layers that are split over the ranks", *left],
        ["enable_sequence_parallel=False"],
    )
