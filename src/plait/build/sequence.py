"""Sequence parallelism around a model that is split over its tensor-parallel ranks."""

import functools
from dataclasses import replace
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.build.names import names_of
from plait.build.proven import Check, Verdict, verdict_on
from plait.build.rules import Rules
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.rules import generalize
from plait.plan.sequence import Region, SequencePlan, Stack, sequence_plan
from plait.styles.sequence import wrap_block, wrap_owner, wrap_region
from plait.styles.sequence_params import can_leave_term, sum_gradients, wrap_row, wrap_term
from plait.styles.sequence_tokens import Tokens

_OFF = "enable_sequence_parallel=False: the same model, activations whole on every rank"
_PROOF = "enable_sequence_parallel"
"""What tells a proof with split sequences from one of the same rules without."""


class SplitCopy(Protocol):
    """Splits a copy of a module, also along the sequence."""

    def __call__(self, copied: nn.Module, *, sums_late: bool) -> nn.Module:
        """`sums_late`: as for `sequence_plan`."""


def is_asked(config: object) -> bool:
    """Whether a config asks for activations that are split along the sequence."""
    return bool(getattr(config, "enable_sequence_parallel", False))


def proven(
    module: nn.Module, plan: Plan, check: Check, mesh: DeviceMesh, split: SplitCopy
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
    names = names_of(module)
    found = sequence_plan(names, plan)
    asked = f"enable_sequence_parallel=True for {names.model}:"
    if not found.stacks:
        raise _no_blocks(asked, found)
    if check is False:
        return found
    early, late = found, sequence_plan(names, plan, sums_late=True)
    for found in [late, early] if late != early else [early]:  # late moves fewer bytes, if right
        is_late = found is late
        rules = Rules({_PROOF: "late" if is_late else "early"}, dict(plan.rules))
        noted = functools.partial(split, sums_late=is_late)
        verdict = verdict_on(module, rules, check, mesh, noted)
        if not verdict.wrong:
            break
    wrong = replace(verdict, unreached=()).in_words(names.model, check)
    if wrong:
        raise _refusal(module, asked, found, verdict, wrong)
    missed = set(verdict.unreached)
    unproven = [stack.name for stack in found.stacks if _is_missed(stack, plan, missed)]
    found = found.without(unproven, "the proof does not reach it")
    if not found.stacks:
        raise _no_blocks(asked, found)
    return found


def _refusal(
    module: nn.Module, asked: str, found: SequencePlan, verdict: Verdict, wrong: str
) -> PlanError:
    ways = [_OFF, "check=False: use it as it is"]
    if not verdict.is_known:
        ways.insert(1, "check=batch: prove it on the module itself")
    blocks = [
        f"blocks in {stack.name!r}: {type(module.get_submodule(stack.blocks[0])).__name__}"
        for stack in found.stacks
    ]
    return PlanError(asked, [wrong, *blocks], ways)


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
            _wrap(modules, region, tokens)
        for name in stack.blocks:
            first, last = stack.blocks[0], stack.blocks[-1]
            wrap_block(modules[name], tokens, is_first=name == first, is_last=name == last)
        wrap_owner(modules[stack.owner], [tokens])
    wrap_owner(module, [])  # sees what the caller asks for before anybody below


def _wrap(modules: dict[str, nn.Module], region: Region, tokens: Tokens) -> None:
    terms = [modules[name] for name in region.terms]
    late = bool(terms) and all(can_leave_term(part) for part in terms)
    for part in terms if late else ():
        wrap_term(part, tokens)
    wrap_region(
        modules[region.name],
        tokens,
        cuts_output=region.cuts_output or (bool(terms) and not late),
        sums_output=late,
    )


def _no_blocks(asked: str, found: SequencePlan) -> PlanError:
    left = [f"{name}: {why}" for name, why in found.whole.items()]
    none = "no list of blocks in it holds layers that are split over the ranks"
    return PlanError(asked, left or [none], [_OFF])
