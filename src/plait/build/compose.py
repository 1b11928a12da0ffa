"""The ordered composition: what happens to a module, in which order, and why in that order.

1. Resolve the sizes against the processes. Nothing else makes sense if they do not fit.
2. Make the mesh: its axes are all that later steps know of the processes.
3. Resolve the plan, prove what of it was derived on a small copy, deal out the heads, and check
   every style against every parameter: all refusals come before the first change, so a refused
   module is as it was.
   Where ranks are to share sequences, prove on the small copy that all that mixes tokens in it is
   attention that can be shared.
4. Cut the parameters that rules name. On meta this only notes which slice the reader will read.
5. Make every other parameter a DTensor that is whole on every rank, so that optimizers and norms
   meet one kind of parameter.
6. Put the borders around the forwards, and around the whole, which tells the other ranks of a
   failure.
7. For a model of transformers, bind what has to know that it is split: generate() and
   save_pretrained(), which look at the finished borders.
8. Shard over the data ranks, inner modules first. Last, since FSDP cuts what tensor parallelism has
   left of each parameter, and gathers it before anything else happens in a forward.
"""

import logging
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait import mesh as meshes
from plait.build import sequence, sharing
from plait.build.agreeing import Followers, agree
from plait.build.apply import apply
from plait.build.axes import data_axis, fsdp_axes, shard_axis, tp_axis
from plait.build.checks import check as check_plan
from plait.build.names import names_of
from plait.build.proven import Check, Verdict, verdict_on
from plait.build.root import install_root
from plait.build.rules import Rules, TpPlan, rules_for, user_rules
from plait.build.sharding import groups_for, shard
from plait.errors import LayoutError, PlanError
from plait.hf.adapt import adapt, is_transformers_model
from plait.hf.peft import expect_peft, split_with_adapters
from plait.hf.trainer import expect_trainer
from plait.layout import DistributedConfig, ParallelismConfig, factors
from plait.layout.config import refuse_other
from plait.plan import ModelNames, Plan, resolve
from plait.plan.attention import with_heads
from plait.plan.intervals import whole
from plait.plan.sequence import SequencePlan, sequence_plan
from plait.run import environment, process_group, progress
from plait.state import STATE, ParallelState, held_fraction, own_class
from plait.styles import ALL_PARALLEL_STYLES
from plait.styles.quantized import refuse_quantized

_log = logging.getLogger("plait")
_MOSTLY_WHOLE = 0.35
"""A plan that leaves this much more than 1/n of the parameters on each rank is worth a warning."""


def parallelize(
    module: nn.Module,
    config: ParallelismConfig | None = None,
    tp_plan: TpPlan = None,
    *,
    device_mesh: DeviceMesh | None = None,
    check: Check | None = None,
) -> nn.Module:
    """Split a module over the ranks, in place.

    Args:
        module: Any module, with the same weights in memory on every rank, or on the meta device.
        config: The parallel sizes. Default: tensor parallel over all processes.
        tp_plan: Rules, name pattern → style name, which replace or join the module's own. None:
            those of `config`, or `"auto"`. `"auto"`: the plan that the module ships (a `_tp_plan`,
            as models of transformers have), improved and completed by one derived from its
            structure. `"model"`: the shipped one as it stands. `{}`: no rule. Rules for a module
            that ships no plan are the whole plan; `derive_plan` gives a base to join them with.
        device_mesh: A mesh to use instead of building one: one axis, or one that has an axis named
            `tp`. The sizes in `config` are then not looked at.
        check: Whether rules that were derived are proven before they are used; None: as `config`
            says, which is True unless told otherwise. True: a small copy of the
            model runs whole and split on these ranks, once for each class and config (some
            seconds). A batch, keyword arguments of the forward: the module itself is run with it,
            in float64, which works for any module. False: they are used unproven. Where a proof
            fails, a model that ships a plan is split by that one alone, with a warning.

    Returns:
        The module itself. Its parameters are DTensors on the axis `tp`, under the same names.
        With one process, or all sizes 1, it is returned as it came.

    Raises:
        LayoutError: The sizes do not fit the processes, there are more ranks than heads, or the
            module has been split before. Nothing has been changed.
        PlanError: The plan cannot be applied; every problem is listed. Or a derived plan is not
            right, or cannot be proven. Nothing has been changed.

    Comm:
        The first call of a process makes the groups of the mesh. A proof runs models.
    """
    refuse_other(config, "config")
    split = [n or "the module itself" for n, p in module.named_modules() if is_split(p)]
    if split:
        raise LayoutError(
            f"parallelize({type(module).__name__}):",
            f"{split[0]} has been split already",
            ["make a new module", "split the whole in one call, with the rules for its parts"],
        )
    config = config if config is not None else _default_config(device_mesh)
    expect_peft()
    expect_trainer()

    def inside(inner: nn.Module) -> nn.Module:
        return parallelize(inner, config, tp_plan, device_mesh=device_mesh, check=check)

    if split_with_adapters(module, inside):
        return module
    asked = {"config": config, "tp_plan": tp_plan}
    mesh = device_mesh if device_mesh is not None else _mesh_of_same(module, config, asked)
    if mesh is None:
        return module
    if device_mesh is not None:
        agree(module, asked, mesh)
    axes = sequence_axes_for(config, mesh)
    followers, tp_mesh = Followers(module), tp_axis(mesh)
    chosen = tp_plan if tp_plan is not None else getattr(config, "tp_plan", None)
    if check is None:
        check = getattr(config, "check_plan", True)
    _refuse_early(module, mesh, config)
    if tp_mesh.size() == 1 and mesh.size() > 1:
        plan = _plan(names_of(module), Rules({}), {}, 1)  # nothing is cut but by data parallelism
    else:
        plan = _proven_plan(module, chosen, mesh, config, check)
    sequences = _proven_sequences(module, plan, mesh, config, check)
    if axes is not None:
        sharing.prove(module, axes, check)
    _split(module, plan, mesh, config, sequences, axes)
    shard(module, mesh, config)
    followers.follow(module)
    if check is not False and plan.entries and not _ships(plan):
        progress.report(
            f"{own_class(module).__name__}: the plan derived from its structure\n{plan}"
        )
    held = held_fraction(module)
    if plan.rules and held > 1 / tp_mesh.size() + _MOSTLY_WHOLE and environment.world().rank == 0:
        _log.warning(
            "%s: each of %d ranks holds %.0f %% of the parameters: the plan splits little of it",
            own_class(module).__name__,
            tp_mesh.size(),
            100 * held,
        )
    return module


def _refuse_early(module: nn.Module, mesh: DeviceMesh, config: ParallelismConfig) -> None:
    """What later steps would refuse, before anything is changed."""
    if config.cp_size * config.sp_size > 1:
        sharing.check(module, config)
    if fsdp_axes(mesh) is not None:
        words = f"{own_class(module).__name__} sharded over data ranks:"
        refuse_quantized(module, words, "tp_size alone; adapters on it are trained so")
        groups_for(module, config)  # refuses now what it will refuse at the end


def _split(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    config: ParallelismConfig | DistributedConfig,
    sequences: SequencePlan | None = None,
    axes: meshes.SequenceAxes | None = None,
) -> nn.Module:
    """Steps 3 to 7 of the composition, the plan being known."""
    tp_mesh = tp_axis(mesh)
    if tp_mesh.size() == 1 and mesh.size() > 1:
        params = module.named_parameters(remove_duplicate=False)
        layouts = {name: whole(tuple(param.shape)) for name, param in params}
    else:
        check_plan(module, plan, tp_mesh)
        layouts = apply(module, plan, tp_mesh)
    module.__dict__[STATE] = ParallelState(
        mesh, tp_mesh, plan, layouts, config, shard_axis(mesh), data_axis(mesh), axes
    )
    if axes is not None:
        sharing.use_attention(module)
    if sequences is not None:
        sequence.install(module, sequences, tp_mesh)
    install_root(module)
    module.__dict__["_tp_size"] = tp_mesh.size()
    module.__dict__["_tp_plan"] = plan.rules
    if not hasattr(type(module), "tp_plan"):  # models of transformers have properties for these
        module.__dict__["tp_plan"] = plan.rules
        module.__dict__["tp_size"] = tp_mesh.size()
    if is_transformers_model(module):
        adapt(module, module.__dict__[STATE])
    return module


def _ships(plan: Plan) -> bool:
    """Whether some rule of a plan is not derived."""
    return any(entry.origin in ("model", "user") for entry in plan.entries)


def _proven_plan(
    module: nn.Module,
    tp_plan: TpPlan,
    mesh: DeviceMesh,
    config: ParallelismConfig | DistributedConfig,
    check: Check,
) -> Plan:
    """The plan to apply, its derived rules proven, or without them.

    Raises:
        PlanError: Derived rules are wrong, or cannot be proven, and there are no others.
    """
    names, tp_mesh = names_of(module), tp_axis(mesh)
    rules = rules_for(module, names, tp_plan)
    # Rules of the user's are no part of the proof: a wrong one is not a mistake of the derived.
    base: TpPlan = tp_plan if user_rules(tp_plan) is None else "auto"
    left_out: set[str] = set()
    reason = "the proof does not reach it"

    def split(copied: nn.Module) -> nn.Module:
        inside, same = names_of(copied), rules
        if not rules.is_general:  # they number the layers of the whole model; a copy has fewer
            same = rules_for(copied, inside, base).without(left_out, reason)
        return _split(copied, _plan(inside, same, None, tp_mesh.size()), tp_mesh, config)

    verdict = verdict_on(module, rules, check, tp_mesh, split)
    while check is True and verdict.unreached and not verdict.wrong:
        left_out |= set(verdict.unreached)
        rules = rules.without(left_out, reason)
        if environment.world().rank == 0:
            shown = ", ".join(verdict.unreached)
            _log.info("%s: the proof does not reach %s: left whole", names.model, shown)
        verdict = verdict_on(module, rules, check, tp_mesh, split)
    wrong = verdict.in_words(names.model, check)
    if wrong and not rules.shipped:
        raise _refusal(names, tp_mesh.size(), verdict, wrong, check)
    if wrong:
        if environment.world().rank == 0:
            _log.warning(
                "%s is split by the plan it ships alone, since the improved one is not proven: %s",
                names.model,
                wrong,
            )
        rules = Rules(rules.shipped)
    return _plan(names, rules, tp_plan, tp_mesh.size())


def _proven_sequences(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    config: ParallelismConfig | DistributedConfig,
    check: Check,
) -> SequencePlan | None:
    """Where activations are split along the sequence, proven; None where that is not asked."""
    tp_mesh = tp_axis(mesh)
    if not sequence.is_asked(config) or tp_mesh.size() == 1:
        return None

    def split(copied: nn.Module, *, sums_late: bool) -> nn.Module:
        inside = names_of(copied)
        same = _plan(inside, Rules(plan.rules), None, tp_mesh.size())
        return _split(copied, same, mesh, config, sequence_plan(inside, same, sums_late))

    return sequence.proven(module, plan, check, tp_mesh, split)


def _refusal(
    names: ModelNames, num_ranks: int, verdict: Verdict, wrong: str, check: Check
) -> PlanError:
    ways = ["tp_plan={…} with rules of your own; plait check shows where it differs"]
    if check is True:
        ways.append("check=batch: prove it on the module itself")
    else:
        ways.append("a batch that reaches them too" if verdict.unreached else "another batch")
    ways.append("check=False: use it as it is")
    return PlanError(f"The plan derived for {names.model} over {num_ranks} ranks:", wrong, ways)


def is_split(part: nn.Module) -> bool:
    """Whether `parallelize` has been at one module of a tree."""
    return STATE in part.__dict__ or "_plait_border" in part.__dict__


def mesh_for(config: ParallelismConfig, device_type: str | None = None) -> DeviceMesh | None:
    """The mesh for `config` over the processes that there are, or None for a single process.

    Raises:
        LayoutError: The sizes do not fit the number of processes.
    """
    world = environment.world()
    layout = config.resolve(world.num_processes)
    if layout.is_single:
        return None
    device = process_group.ensure(device_type)
    return meshes.build(layout, device.type)


def sequence_axes_for(config: ParallelismConfig, mesh: DeviceMesh) -> meshes.SequenceAxes | None:
    """The ranks that share sequences, as a config asks; None where none are to.

    Args:
        config: The sizes.
        mesh: The one of the config.

    Raises:
        LayoutError: The mesh is another than the config's.

    Comm: the groups of the axes are formed at the first call for a layout. All ranks must call.
    """
    if config.cp_size * config.sp_size == 1:
        return None
    layout = config.resolve(environment.world().num_processes)
    folded = {name: size for name, size in layout.folded.items() if size > 1}
    names = mesh.mesh_dim_names or ()
    have = {name: size for name, size in zip(names, mesh.shape, strict=True) if size > 1}
    if have != folded:
        raise LayoutError(
            f"{factors(layout.sizes)} on the axes {have}:",
            f"ranks that share sequences are shards: the mesh of this config is {folded}",
            "leave device_mesh out: the mesh is made from the config",
        )
    return meshes.sequence_axes(layout, mesh.device_type)


def _mesh_of_same(
    module: nn.Module, config: ParallelismConfig, asked: dict[str, Any]
) -> DeviceMesh | None:
    """The mesh for `config`, if all processes ask for the same."""
    if environment.world().num_processes not in (None, 1):
        agree(module, asked, meshes.world(process_group.ensure(None).type))
    return mesh_for(config)


def plan_for(module: nn.Module, tp_plan: TpPlan = None, num_ranks: int = 1) -> Plan:
    """The plan that `parallelize` would apply.

    Args:
        module: The module, on any device.
        tp_plan: As for `parallelize`.
        num_ranks: Ranks to split over.

    Raises:
        PlanError: It cannot be resolved, or there are no rules at all.
    """
    names = names_of(module)
    return _plan(names, rules_for(module, names, tp_plan), tp_plan, num_ranks)


def _plan(names: ModelNames, rules: Rules, tp_plan: TpPlan, num_ranks: int) -> Plan:
    user = user_rules(tp_plan)
    plan = resolve(names, rules.merged, user, list(ALL_PARALLEL_STYLES), derived=rules.derived)
    if user is None and not plan.entries:
        raise PlanError(
            f"Tensor parallelism for {names.model}:",
            ["it ships no plan, and none can be derived from its structure", *rules.reasons],
            [
                "tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'} with its own names",
                "tp_size=1",
            ],
        )
    plan = replace(plan, whole=rules.whole if user is None else {})
    return with_heads(plan, names, num_ranks)


def _default_config(device_mesh: DeviceMesh | None) -> ParallelismConfig:
    if device_mesh is not None:
        return DistributedConfig(tp_size=tp_axis(device_mesh).size())
    world = environment.world()
    return DistributedConfig(tp_size=world.world_size if world.launched else 1)
