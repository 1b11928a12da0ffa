"""Modules and parameters that were put into a split module afterwards become part of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plait import comm
from plait.errors import PlaitError, RankError
from plait.run.around import split_module
from plait.state import LAYOUT, STATE, ParallelState, own_class, state_of
from plait.styles import ALL_PARALLEL_STYLES, TensorParallelLayer
from plait.styles.containers import style_of_rest
from plait.styles.params import replicate
from plait.surgery.data_ranks import average_over_data, spread_over_data
from plait.surgery.keeping import keep_records
from plait.surgery.loading import is_part, layout_of, take_whole_tensors
from plait.surgery.optimizers import tell_optimizers
from plait.surgery.planned import planned_styles, single_style
from plait.surgery.watching import (
    has_changed,
    is_root,
    is_settled,
    is_sharded,
    plain_parameters,
    set_settled,
    sharded_since,
    watch,
)
from plait.surgery.wrappers import Wrapped, kept_names, look
from plait.weights.outcome import meet


def adopt(model: nn.Module) -> tuple[str, ...]:
    """Make what was put into a split model afterwards part of it, the same on all ranks.

    For a head of your own (`model.lm_head = nn.Linear(…)`, `model.score = …`), a layer that was
    exchanged, a parameter that was assigned. The values are those of the first rank. A module in a
    place that the plan names is cut as the plan says; any other stays whole on every rank.
    Optimizers that hold the new parameters already are given the DTensors in their place.

    The next forward of the model does this by itself. Call it where the parameters are needed
    before: for `save_pretrained`, `full_state_dict`, or to read them.

    Args:
        model: The module that `parallelize` was called on. One that is not split stays as it is.

    Returns:
        The names of the parameters that are new.

    Raises:
        PlanError: The new module cannot do what the plan says of its place: what comes in, or goes
            out, there is split. Nothing has been changed.
        RankError: The ranks have put different things into their models. Nothing has been changed.
        PlaitError: `model` is only a part of what was split.

    Comm:
        One control message, and one broadcast for each new tensor.
    """
    model = split_module(model)
    state = state_of(model)
    if state is None:
        return ()
    refuse_part(model, "plait.adopt")
    if is_sharded(model) and not has_changed(model) and not plain_parameters(model):
        return ()
    return _adopt(model, state)


def adopt_new(model: nn.Module) -> tuple[str, ...]:
    """As `adopt`, but without a message between the ranks where nothing has changed on this one.

    A rank that alone got a new module sends its message while the others are in their forward,
    which then fails on all ranks as a mismatch of collectives: put modules in on every rank.

    Comm:
        None where nothing was put into the model since the last call.
    """
    if torch.compiler.is_compiling() or is_settled(model) or not has_changed(model):
        return ()
    state = state_of(model)
    if is_sharded(model) and not sharded_since(model):
        if all(is_part(part) for part in model.modules()):  # adapters were taken out again
            watch(model)
            return ()
        raise _sharded("The forward", model, look(model))
    if state is None or not plain_parameters(model):
        watch(model)
        return ()
    return _adopt(model, state)


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Adopt what is new; forwards inside do not look again."""
    adopt_new(model)
    before = set_settled(model, True)
    try:
        yield
    finally:
        set_settled(model, before)


def refuse_part(model: nn.Module, asked: str) -> None:
    """Refuse what has to be asked of the whole of a split model.

    Raises:
        PlaitError: `model` is only a part of it.
    """
    if not is_root(model):
        raise PlaitError(
            f"{asked} of a {own_class(model).__name__} inside a split model:",
            "the whole remembers how its parts lie on the ranks",
            "call it on the model that was split",
        )


def refuse_sharded(model: nn.Module, asked: str) -> None:
    """Refuse what exchanges parameters of a model whose parameters FSDP keeps account of.

    Raises:
        PlaitError: The model is sharded over data ranks.
    """
    if is_sharded(model):
        raise _sharded(asked, model)


def _sharded(asked: str, model: nn.Module, wrapped: Wrapped | None = None) -> PlaitError:
    asked = f"{asked} of a {own_class(model).__name__} that is sharded over data ranks:"
    if wrapped is not None and wrapped.parts:
        return PlaitError(
            asked,
            f"adapters were put in that are no part of it yet: {next(iter(wrapped.parts))}",
            "plait.adopt(model) on all ranks, before the optimizer is made",
        )
    return PlaitError(
        asked,
        "modules and parameters cannot be exchanged any more: the new ones would be in no group of "
        "FSDP, and their gradients would not be reduced",
        ["change the model first, and call plait.parallelize then", "tp_size alone allows it"],
    )


def _adopt(model: nn.Module, state: ParallelState) -> tuple[str, ...]:
    fresh, wrapped = plain_parameters(model), look(model)
    if is_sharded(model) and set(fresh) != set(kept_names(wrapped, fresh)):
        raise _sharded("plait.adopt", model)
    axes = [state.tp_mesh, *([state.data_mesh] if state.data_mesh is not None else [])]
    asked = f"New modules in a split {own_class(model).__name__}:"
    together = state.mesh if state.data_mesh is not None else state.tp_mesh
    _agree(asked, fresh, together, set(kept_names(wrapped, fresh)))
    styles = planned_styles(asked, model, state, wrapped) | wrapped.styles(state)
    if fresh:
        values = [*fresh.values(), *_new_buffers(model)]
        with torch.no_grad():
            for tensor in {id(x): x for x in values if not x.is_meta}.values():
                for mesh in axes:
                    tensor.data.copy_(comm.broadcast(tensor.data.contiguous(), mesh))
        cut_plain(model, state, styles, wrapped)
    settle_adapters(model, wrapped)
    refresh(model)
    return tuple(fresh)


def settle_adapters(model: nn.Module, wrapped: Wrapped | None = None) -> None:
    """Make modules around layers work on the parts, and average their gradients over data ranks.

    Args:
        model: The root of what was split.
        wrapped: They, where they are known.

    Comm:
        Of a model that is sharded over data ranks, one all-gather of each copied parameter.
    """
    wrapped, state = wrapped or look(model), state_of(model)
    assert state is not None
    wrapped.finish(model, state)
    if state.data_mesh is not None:
        named = dict(model.named_parameters())
        average_over_data([named[name] for name in kept_names(wrapped, named)], model, state)


def cut_plain(
    model: nn.Module,
    state: ParallelState,
    styles: Mapping[str, TensorParallelLayer],
    wrapped: Wrapped,
) -> None:
    """Make every plain parameter, the same on all ranks, a DTensor, and put the borders in place.

    Args:
        model: The root of what was split.
        state: How it was.
        styles: Module name → its style; every other module stays whole.
        wrapped: The modules that others have put around layers.

    Comm: none.
    """
    modules = dict(model.named_modules())
    fresh = plain_parameters(model)
    own = wrapped.own | set(wrapped.parts)
    if set(kept_names(wrapped, fresh)) == set(fresh):  # nothing else is new
        modules = {name: modules[name] for name in modules if name in own}
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for owner in sorted(modules, key=lambda name: name not in styles):  # tied ones follow these
        part, style = modules[owner], styles.get(owner)
        for name, param in list(part._parameters.items()):
            if param is None or isinstance(param, DTensor):
                continue
            if id(param) in made:
                part._parameters[name] = made[id(param)][1]
                continue
            _cut(part, name, style or single_style(state, owner, name), state.tp_mesh)
            spread_over_data(part, name, state)
            new = part._parameters[name]
            assert new is not None
            made[id(param)] = (param, new)
    for owner, part in modules.items():
        border = styles.get(owner) or _border_of_rest(part, owner, styles, own)
        if border is not None and "_plait_border" not in part.__dict__:
            border.install_forward(part, state.tp_mesh)
        keep_records(part)
        take_whole_tensors(part)
    tell_optimizers({key: new for key, (_, new) in made.items()})
    refresh(model)


def _border_of_rest(
    part: nn.Module, name: str, styles: Mapping[str, TensorParallelLayer], own: set[str]
) -> TensorParallelLayer | None:
    if name not in own:
        return style_of_rest(part, name, styles)
    called = not isinstance(part, nn.ParameterDict | nn.ParameterList)
    return ALL_PARALLEL_STYLES["replicate"] if called and part._parameters else None


def refresh(model: nn.Module) -> None:
    """Bring the recorded layouts of a split model up to date with its parameters.

    Args:
        model: The root of what was split.
    """
    for part in model.modules():
        state: ParallelState | None = part.__dict__.get(STATE)
        if state is None:
            continue
        layouts = {
            name: layout_of(name, param)
            for name, param in part.named_parameters(remove_duplicate=False)
        }
        known = state.layouts
        kept = {
            name: known[name] if name in known and known[name].shape == layout.shape else layout
            for name, layout in layouts.items()
        }
        part.__dict__[STATE] = replace(state, layouts=kept)
    watch(model)


def _agree(
    asked: str, fresh: Mapping[str, nn.Parameter], mesh: DeviceMesh, unfilled: set[str]
) -> None:
    """Refuse what differs between the ranks, or is elsewhere; `unfilled` may be on meta."""
    own = {
        name: f"{tuple(p.shape)} of {str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        for name, p in fresh.items()
    }
    told = meet(mesh, "new modules", own, asked=asked)
    if all(other == told[0] for other in told):
        wrong = [
            f"{n} is {text}"
            for n, text in own.items()
            if not text.endswith(mesh.device_type) and not (n in unfilled and fresh[n].is_meta)
        ]
        if wrong:
            raise PlaitError(
                asked, wrong, f"move them to the model's device first: .to({mesh.device_type!r})"
            )
        return
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    names = list(dict.fromkeys(n for other in told for n in other))
    if not all(told):
        asked = f"{asked.removesuffix(':')}, put in on some ranks only:"
    first = next(n for n in names if len({other.get(n) for other in told}) > 1)
    error = RankError(
        asked,
        [
            f"rank {rank}: {first} is {other.get(first, 'as it was')}"
            for rank, other in zip(ranks, told, strict=True)
        ],
        "put the same modules into the model on all ranks",
    )
    raise comm.mark_announced(error)


def _cut(part: nn.Module, name: str, style: TensorParallelLayer | None, mesh: DeviceMesh) -> None:
    layout = None
    if style is not None:
        layout = style.param_layout(part, name, mesh)
        style.shard_param(part, name, mesh)
    replicate(part, name, mesh)  # nothing to do where the style has made it a DTensor
    new = part._parameters[name]
    assert isinstance(new, DTensor)
    new.__dict__.pop(LAYOUT, None)
    if layout is not None:
        new.__dict__[LAYOUT] = layout


def _new_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The buffers of modules that were not in the tree when it was split."""
    return [
        buffer
        for part in model.modules()
        if not is_part(part)
        for buffer in part._buffers.values()
        if buffer is not None and not isinstance(buffer, DTensor)
    ]
