"""Are all ranks about to split the same in the same way?"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import LayoutError, RankError
from plait.state import own_class
from plait.surgery.optimizers import optimizers_of, tell_optimizers
from plait.weights.outcome import meet


def agree(module: nn.Module, asked: dict[str, Any], mesh: DeviceMesh) -> None:
    """Compare what the ranks were asked for.

    Args:
        module: What is to be split.
        asked: By name, the config and the rules.
        mesh: The ranks that call.

    Raises:
        RankError: They were asked for different things; on all of them. Nothing has been changed.

    Comm: one control message on each axis.
    """
    mine = {name: _words(value) for name, value in asked.items()} | {
        "model": own_class(module).__name__
    }
    words = f"parallelize({mine['model']}):"
    told = meet(mesh, "parallelize", mine, asked=words)
    names = [name for name in mine if len({other.get(name) for other in told}) > 1]
    if not names:
        return
    ranks = mesh.mesh.flatten().tolist()
    problems = [
        f"rank {rank}: {name}={other.get(name)}"
        for name in names
        for rank, other in zip(ranks, told, strict=True)
    ]
    raise comm.mark_announced(
        RankError(words, problems, "give the same on all ranks: they are parts of one whole")
    )


def _words(value: Any) -> str:
    """A value in words; the order of rules does not count."""
    return repr(dict(sorted(value.items())) if isinstance(value, Mapping) else value)


class Followers:
    """The optimizers that hold a module's parameters from before it was split.

    Args:
        module: The module, before.

    Raises:
        LayoutError: One has a state for them already.
    """

    def __init__(self, module: nn.Module) -> None:
        params = dict(module.named_parameters(remove_duplicate=False))
        self.before = {} if any(p.is_meta for p in params.values()) else params
        held = {id(param): param for param in self.before.values()}
        for optimizer in optimizers_of(held) if held else ():
            if any(id(param) in held and state for param, state in optimizer.state.items()):
                raise LayoutError(
                    f"parallelize({own_class(module).__name__}):",
                    f"{type(optimizer).__name__} has a state for its parameters as they are now",
                    [
                        "split the model before the first step",
                        "plait.checkpoint carries the state of a training to another layout",
                    ],
                )

    def follow(self, module: nn.Module) -> None:
        """Give them the parameters that are there now."""
        now = dict(module.named_parameters(remove_duplicate=False))
        pairs = [(old, now.get(name)) for name, old in self.before.items()]
        tell_optimizers({id(old): new for old, new in pairs if new is not None and new is not old})
