"""Dropout in a split model: the same where a tensor is whole, the rank's own where it is split.

At each forward of the whole model the ranks of a group agree on one number, the first rank's, and
follow the stream of random numbers that it begins (see [`streams`][plait.run.streams]). From the
output of a layer that leaves its features split to the input of the layer that sums them, each rank
follows a stream of its own. All of this is a function of the generator's state, so a recomputed
block drops what it dropped before, without a message between the ranks. After the forward the
generator is where it was, one number further.

A forward in which nothing is dropped does none of this.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.modules.dropout import _DropoutNd

from plait.comm import broadcast
from plait.run import streams
from plait.styles.code import kind_of, mentioned
from plait.styles.experts import MoeExpertsParallel
from plait.styles.layer import TensorParallelLayer, border_of, rebind
from plait.styles.linear import ColwiseParallel, RowwiseParallel
from plait.styles.packed import PackedColwiseParallel, PackedRowwiseParallel

_SOURCES = "_plait_random"  # on the root: what may draw random numbers
_INNER = "_plait_inner_random"  # on a layer at the border of split features: its forward before
_PARTS = ("drop", "jitter", "noise", "mask_time_prob", "mask_feature_prob")
_DRAWS = frozenset({"bernoulli", "bernoulli_", "rand_like", "randn_like", "gumbel_softmax"})


@contextmanager
def agreed_randomness(tp_mesh: DeviceMesh, data_mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Random numbers in here are the same on all ranks of the tensor-parallel axis.

    They begin with one number of the first rank's default generator, and differ by data rank.
    Python's and numpy's begin with it too: some models mask with these. At the end each rank's
    generators are as they were, but for that one number.

    Args:
        tp_mesh: The axis whose ranks agree.
        data_mesh: The axis of ranks that see different samples.

    Comm:
        One broadcast of 8 bytes, on the CPU where the process group can.
    """
    states = _agree(tp_mesh, data_mesh)
    try:
        yield
    finally:
        streams.restore(states)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _agree(tp_mesh: DeviceMesh, data_mesh: DeviceMesh | None) -> streams.RandomStates:
    number = streams.drawn()
    if tp_mesh.size() > 1:
        sent = torch.tensor(number, device=_message_device(tp_mesh))
        number = int(broadcast(sent, tp_mesh))
    if data_mesh is not None:
        number = streams.mixed(number, data_mesh.get_local_rank())
    states = streams.saved()
    streams.follow_shared(number)
    streams.seed_others(number)
    return states


@contextmanager
def split_randomness(mesh: DeviceMesh) -> Iterator[None]:
    """Random numbers in here are each rank's own, for a dropout of split tensors.

    Split layers inside do not end it. Afterwards the ranks follow the same numbers again, however
    many each of them drew. Outside of the forward of a split model, or where nothing is dropped, it
    does nothing.

    Args:
        mesh: The axis over which the tensors are split.

    Comm: none.
    """
    began = streams.begin_own(mesh.get_local_rank(), streams.HELD)
    try:
        yield
    finally:
        if began:
            streams.end_own(streams.HELD)


@contextmanager
def whole_randomness(mesh: DeviceMesh) -> Iterator[None]:
    """Random numbers in here are those of all ranks, for a dropout of a whole tensor.

    For use among split tensors; elsewhere it does nothing.

    Args:
        mesh: The axis over which the tensors around are split.

    Comm: none.
    """
    kind = streams.current()
    ended = kind in (streams.OPENED, streams.HELD) and streams.end_own(kind)
    try:
        yield
    finally:
        if ended:
            streams.begin_own(mesh.get_local_rank(), kind)


class _Sources:
    """What may draw random numbers in a model's training forward, and whether it does now.

    Attributes:
        key: What the list was made for; another means that the model has changed.
        parts: Modules with the name of the attribute that says how much is dropped; a name of None
            means that nothing says it.
        installed: Whether the model's split layers begin and end the ranks' own streams.
    """

    def __init__(self, root: nn.Module, key: object) -> None:
        self.key = key
        self.installed = False
        self.parts: list[tuple[nn.Module, str | None]] = []
        for part in root.modules():
            self.parts += [(part, name) for name in _sources_of(part)]

    def are_active(self) -> bool:
        """Whether something is dropped at the moment."""
        for part, name in self.parts:
            if not part.training:
                continue
            if name is None:
                return True
            value = getattr(part, name)
            if value if name != "config" else _drops_by_config(value):
                return True
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model looks for itself


def drops_in(root: nn.Module, key: object = None) -> bool:
    """Whether a forward of a model would draw random numbers now.

    Asked are the modules in training mode: their dropouts, their attributes that are called so, and
    their config where their code reads it from there. A class whose code draws and that has none of
    these always counts.

    Args:
        root: The whole model.
        key: Something that is another object after modules have been put into the model.

    Comm: none.
    """
    found: _Sources | None = root.__dict__.get(_SOURCES)
    if found is None or (found.key is not key and not torch.compiler.is_compiling()):
        found = root.__dict__[_SOURCES] = _Sources(root, key)
    return bool(found.parts) and found.are_active()


# Seeds are no part of a compiled graph; the calls inside are.
@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def call_agreed(
    root: nn.Module,
    meshes: tuple[DeviceMesh, DeviceMesh | None],
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call something of a model that draws random numbers, with those that its ranks agree on.

    Args:
        root: The whole model.
        meshes: The axis whose ranks agree, and that of the ranks that see different samples.
        call: What to call.
        *args: Its arguments.
        **kwargs: Its arguments by name.

    Comm:
        As `agreed_randomness`.
    """
    _prepare(root)
    states = _agree(*meshes)
    try:
        return call(*args, **kwargs)
    finally:
        _restore(states)


_restore = torch.compiler.disable(streams.restore)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare(root: nn.Module) -> None:
    found: _Sources = root.__dict__[_SOURCES]
    if not found.installed:
        install_borders(root)
        found.installed = True


def install_borders(root: nn.Module) -> None:
    """Let the split layers of a model begin and end each rank's own stream of random numbers.

    Args:
        root: The model. Layers that do so already are left alone.
    """
    for part in root.modules():
        border = part.__dict__.get("_plait_border")
        if border is None or _INNER in part.__dict__:
            continue
        change = _change_at(border.style)
        if change is not None:
            part.__dict__[_INNER] = part.__dict__["forward"]
            rebind(part, change)


def _change_at(style: TensorParallelLayer) -> Any:
    """The forward that a layer of a style gets, or None: nothing changes there."""
    if isinstance(style, ColwiseParallel):
        return _begin_after if style.output_layouts == Shard(-1) else None
    if isinstance(style, RowwiseParallel):
        return _end_before if style.input_layouts == Shard(-1) else None
    if isinstance(style, PackedColwiseParallel):
        return _begin_after
    if isinstance(style, PackedRowwiseParallel):
        return _end_before
    return _own_inside if isinstance(style, MoeExpertsParallel) else None


def _begin_after(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = module.__dict__[_INNER](*args, **kwargs)
    if torch.compiler.is_compiling():
        _begin_uncompiled(module)
    elif streams.current() == streams.SHARED:
        streams.begin_own(border_of(module).mesh.get_local_rank())
    return output


def _end_before(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        _end_uncompiled()
    elif streams.current() == streams.OPENED:
        streams.end_own()
    return module.__dict__[_INNER](*args, **kwargs)


def _own_inside(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with split_randomness(border_of(module).mesh):
        return module.__dict__[_INNER](*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin_uncompiled(module: nn.Module) -> None:
    streams.begin_own(border_of(module).mesh.get_local_rank())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_uncompiled() -> None:
    streams.end_own()


def _sources_of(part: nn.Module) -> list[str | None]:
    """Attributes of one module that say how much is dropped; `[None]`: nothing says it."""
    if isinstance(part, _DropoutNd):
        return ["p"]
    found: list[str | None] = [
        name
        for name, value in part.__dict__.items()
        if type(value) in (int, float) and any(word in name.lower() for word in _PARTS)
    ]
    if found or any("drop" in name.lower() for name in part._modules):
        return found
    # A model's base class speaks of dropouts in code that prepares models.
    only = frozenset({"forward"}) if hasattr(part, "from_pretrained") else None
    names = mentioned(kind_of(part), only)
    if not any(name in _DRAWS or name.endswith("dropout") for name in names):
        return []
    return ["config"] if "config" in names and "config" in part.__dict__ else [None]


def _drops_by_config(config: Any) -> bool:
    return any(
        type(value) in (int, float) and value > 0 and any(word in name for word in _PARTS)
        for name, value in vars(config).items()
    )


def _message_device(mesh: DeviceMesh) -> str:
    try:
        mesh.get_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return mesh.device_type
    return "cpu"
