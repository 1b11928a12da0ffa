"""Sequence parallelism around a model that is split over its tensor-parallel ranks."""

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.build.names import names_of
from plait.build.proven import Check, Split, verdict_on
from plait.build.rules import Rules
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.rules import generalize
from plait.plan.sequence import SequencePlan, Stack, sequence_plan
from plait.styles.sequence import wrap_block, wrap_owner, wrap_region
from plait.styles.sequence_params import sum_gradients, wrap_row
from plait.styles.sequence_tokens import Tokens

_OFF = "enable_sequence_parallel=False: the same model, activations whole on every rank"
_PROOF = {"enable_sequence_parallel": "True"}
"""What tells a proof with split sequences from one of the same rules without."""


def is_asked(config: object) -> bool:
    """Whether a config asks for activations that are split along the sequence."""
    return bool(getattr(config, "enable_sequence_parallel", False))


def proven(
    module: nn.Module, plan: Plan, check: Check, mesh: DeviceMesh, split: Split
) -> SequencePlan:
    """Decide where a model's activations are split along the sequence, and prove it.

    What a block's own code does between its modules no name tells: whether every token is treated
    by itself there is found by running it.

    Args:
        module: The module, unsplit.
        plan: Its tensor-parallel plan.
        check: As for `parallelize`; False: nothing is proven.
        mesh: The axis `tp`. All its ranks call this.
        split: Splits a copy, by the same rules and along the sequence.

    Returns:
        The decisions. Lists of blocks that the proof does not reach stay whole.

    Raises:
        PlanError: No list of blocks can be split, or the proof finds a difference.

    Comm:
        As `verdict_on`.
    """
    found = sequence_plan(names_of(module), plan)
    asked = f"enable_sequence_parallel=True for {type(module).__name__}:"
    if not found.stacks:
        raise _no_blocks(asked, found)
    if check is False:
        return found
    verdict = verdict_on(module, Rules(_PROOF, dict(plan.rules)), check, mesh, split)
    wrong = replace(verdict, unreached=()).in_words(type(module).__name__, check)
    if wrong:
        ways = [_OFF, "check=False: use it as it is"]
        if not verdict.is_known:
            ways.insert(1, "check=batch: prove it on the module itself")
        blocks = [
            f"blocks in {s.name!r}: {type(module.get_submodule(s.blocks[0])).__name__}"
            for s in found.stacks
        ]
        raise PlanError(asked, [wrong, *blocks], ways)
    missed = set(verdict.unreached)
    unproven = [stack.name for stack in found.stacks if _is_missed(stack, plan, missed)]
    found = found.without(unproven, "the proof does not reach it")
    if not found.stacks:
        raise _no_blocks(asked, found)
    return found


def _is_missed(stack: Stack, plan: Plan, missed: set[str]) -> bool:
    below = [e for e in plan.entries if e.name.startswith(f"{stack.name}.")]
    return all(generalize(entry.rule) in missed for entry in below)


def install(module: nn.Module, found: SequencePlan, mesh: DeviceMesh) -> None:
    """Split activations along the sequence between the tensor-parallel regions, in place.

    Args:
        module: A module whose parameters and borders are in place.
        found: What was decided.
        mesh: The axis `tp`.

    Comm: none.
    """
    modules = dict(module.named_modules())
    for stack in found.stacks:
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
    wrap_owner(module, [])  # sees what the caller asks for before anybody below


def _no_blocks(asked: str, found: SequencePlan) -> PlanError:
    left = [f"{name}: {why}" for name, why in found.whole.items()]
    none = "no list of blocks in it holds layers that are split over the ranks"
    return PlanError(asked, left or [none], [_OFF])
