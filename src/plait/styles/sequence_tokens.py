"""How the tokens lie on the ranks while a list of blocks runs."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import chunk_sizes, exchange, gather_from, scatter_sum, split_to
from plait.comm.handing import gather_for
from plait.errors import PlanError

_OFF: ContextVar[bool] = ContextVar("plait_whole_sequences", default=False)


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """In here every rank holds all tokens, as without sequence parallelism."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def sequences_are_whole() -> bool:
    """Whether this is inside of `whole_sequences`."""
    return _OFF.get()


class Spread(NamedTuple):
    """How the tokens of one forward lie on the ranks.

    Attributes:
        sizes: Tokens of each rank; they lie along the last dim but one.
        before: The dims before it.
    """

    sizes: tuple[int, ...]
    before: torch.Size


class Tokens:
    """What the parts of one list of blocks share.

    Attributes:
        name: Name of the list, for messages.
        mesh: The axis.
        spread: How the tokens lie while the blocks run, else None.
        is_open: Whether the forward that calls the blocks is running and may split.
        recorded: Whether it could at its calls so far that recorded a graph.
    """

    __slots__ = ("is_open", "latest", "mesh", "name", "recorded", "spread")

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.name, self.mesh = name, mesh
        self.spread: Spread | None = None
        self.is_open = False
        self.recorded: set[bool] = set()
        self.latest: tuple[torch.Tensor, int, bool, torch.Tensor, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokens":
        return Tokens(self.name, self.mesh)

    def cut(self, x: Any) -> torch.Tensor:
        """This rank's tokens of hidden states that every rank holds; notes how they lie."""
        if not isinstance(x, torch.Tensor) or x.ndim < 2:
            raise self.refusal(f"a block is called with {_shown(x)} first, not hidden states")
        sizes = chunk_sizes(x.shape[-2], self.mesh.size())
        self.spread = Spread(sizes, x.shape[:-2])
        return split_to(x, self.mesh, dim=x.ndim - 2, sizes=sizes)

    def ask(self, x: torch.Tensor) -> None:
        """Note how the tokens lie whose piece `x` is; the ranks tell each other."""
        self.spread = Spread(tuple(exchange(x.shape[-2], self.mesh)), x.shape[:-2])

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of what a region gives whole."""
        return self._by_token(x, True, split_to)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of the sum of all ranks' terms."""
        return self._by_token(x, True, scatter_sum)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens behind the last block."""
        return self._by_token(x, False, gather_from)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, for a region; regions that are called with the same tensor share them."""
        records = torch.is_grad_enabled()
        if self.latest is not None:
            known, version, recorded, found, found_version = self.latest
            same = known is x and version == x._version
            if same and recorded == records and found._version == found_version:
                return found
        whole = self._by_token(x, False, gather_for)
        if not x.is_inference():
            self.latest = (x, x._version, records, whole, whole._version)
        return whole

    def _by_token(self, x: Any, whole: bool, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Apply one of the collectives to `x`, whose dims but the last may have become one.

        Raises:
            PlanError: `x` does not hold all tokens, or (`whole` false) the rank's.
        """
        spread = self.spread
        assert spread is not None
        here = sum(spread.sizes) if whole else spread.sizes[self.mesh.get_local_rank()]
        if isinstance(x, torch.Tensor) and x.ndim > 1:
            count = spread.before.numel()
            if x.ndim == 2 and spread.before and x.shape[0] == count * here:
                return function(
                    x.reshape(*spread.before, here, x.shape[1]),
                    self.mesh,
                    dim=len(spread.before),
                    sizes=spread.sizes,
                ).flatten(0, -2)
            if x.shape[-2] == here:
                return function(x, self.mesh, dim=x.ndim - 2, sizes=spread.sizes)
        what = "all tokens" if whole else "its tokens"
        raise self.refusal(f"a rank's part of {spread.sizes} tokens: {_shown(x)} is not {what}")

    def refusal(self, problem: str, *ways: str) -> PlanError:
        """The error of a model that cannot be split along the sequence."""
        return PlanError(
            f"Sequence parallelism in the blocks of {self.name!r}:",
            problem,
            [*ways, "enable_sequence_parallel=False"],
        )


def _shown(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
