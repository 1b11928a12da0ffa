"""Means, variances and norms over a width that is split: what torch functions give, over all ranks.

Each of them is a sum over the ranks of one number a row. Half-precision numbers are summed in
float32, as torch does within one process.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from plait.comm import copy_to, sum_from
from plait.errors import PlanError
from plait.plan.intervals import Pieces
from plait.styles.heads import rearranged
from plait.styles.statistic_answers import ANSWERS, SIZES, SUMS, Answer, wide


@dataclass(frozen=True)
class Width:
    """A last dim that is split.

    Attributes:
        local: Its features on this rank.
        whole: Those of the whole model.
        counted: Ranges of the local features that this rank counts; None: all.
    """

    local: int
    whole: int
    counted: Pieces | None = None


class Statistics(TorchFunctionMode):
    """Makes statistics over a last dim that is split those over all of it.

    Args:
        mesh: The axis.
        name: The class of the module whose forward runs, for messages.

    Attributes:
        answered: How many statistics were taken over all ranks.

    Comm:
        Each mean or sum: forward one all-reduce, backward one.
    """

    sums = False
    """Whether sums and norms are statistics too, besides means and variances."""

    def __init__(self, mesh: DeviceMesh, name: str = "") -> None:
        super().__init__()
        self.mesh, self.name = mesh, name
        self.answered = 0
        self.width = Width(0, 0)
        self._has_read_size = self._has_summed = False

    def width_of(self, x: torch.Tensor) -> Width | None:
        """The split width that the last dim of `x` is, or None."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers statistics over the last dim; leaves all else alone."""
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        if isinstance(x, torch.Tensor) and x.ndim:
            mine = ANSWERS.get(func)
            if mine is None and self.sums:
                mine = SUMS.get(func)
                self._has_summed |= mine is not None and self._look(func, mine, x, args, kwargs)
                self._has_read_size |= func in SIZES and self.width_of(x) is not None
                self._refuse_local_sizes()
            if mine is not None and self._look(func, mine, x, args, kwargs):
                self.answered += 1
                return mine.answer(self, x, mine.given(args, kwargs))
        return self.follow(func, args, kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls any other function."""
        return func(*args, **kwargs)

    def _look(self, func: Any, mine: Answer, x: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Whether this is about the last dim, and that is a split one; then `width` is set."""
        width = self.width_of(x)
        if width is None:
            return False
        given = mine.given(args, kwargs)
        if "normalized_shape" in mine.names:
            shape = tuple(given["normalized_shape"])
            found = shape in ((width.whole,), (width.local,))
        else:
            dim = given.get("dim", mine.dim)
            dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
            last = [d for d in dims if d in (-1, x.ndim - 1) and type(d) is int]
            found = bool(last) and len(dims) == 1
            if self.sums and not found and (last or dims in ((None,), ())) and x.ndim > 1:
                raise PlanError(
                    f"A statistic of {self.name}, whose width is split:",
                    f"{getattr(func, '__name__', func)} over the dims {dim}, not over the last one",
                    "give it the style 'replicate'",
                )
        if found:
            self.width = width
        return found

    def _refuse_local_sizes(self) -> None:
        if self._has_read_size and self._has_summed:
            raise PlanError(
                f"The width of {self.name} is split:",
                "its forward takes a sum or a norm and reads a size, which is this rank's",
                ["take a mean", "keep the width in an attribute", "give it the style 'replicate'"],
            )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the whole width, `[..., 1]`; in float32 for half-precision numbers."""
        counted, x = self.width.counted, wide(x)
        if counted is not None:
            x = rearranged(x, -1, counted)
        return copy_to(sum_from(x.sum(-1, keepdim=True), self.mesh), self.mesh)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the whole width, `[..., 1]`; in float32 for half-precision numbers."""
        return self.sum(x) / self.width.whole

    def variance(self, x: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
        """The variance over the whole width, without correction, `[..., 1]`."""
        x = wide(x)
        return self.mean((x - (self.mean(x) if mean is None else mean)).square())

    def norm(self, x: torch.Tensor, order: Any) -> torch.Tensor:
        """The vector norm over the whole width, `[..., 1]`."""
        order = 2.0 if order in (None, "fro") else order
        if not isinstance(order, int | float) or order in (0, float("inf"), float("-inf")):
            raise PlanError(
                f"A norm of {self.name}, whose width is split:",
                f"of the order {order!r}",
                "give it the style 'replicate'",
            )
        x = wide(x)
        total = self.sum(x.square() if order == 2 else x.abs().pow(order))
        empty = total == 0  # torch's gradient there is 0, that of a root is infinite
        return total.masked_fill(empty, 1).pow(1 / order).masked_fill(empty, 0)


class StatisticsOfWidth(Statistics):
    """Every last dim of `width.local` features is the split one: what a norm sees.

    Args:
        width: The split width.
        mesh: The axis.
        name: The class of the module whose forward runs.
    """

    sums = True

    def __init__(self, width: Width, mesh: DeviceMesh, name: str) -> None:
        super().__init__(mesh, name)
        self.split = width

    def width_of(self, x: torch.Tensor) -> Width | None:
        """The width where the sizes are equal."""
        return self.split if x.shape[-1] == self.split.local else None


class StatisticsOfFlow(Statistics):
    """The last dims of what split layers give out are split, and of what is computed from these.

    No size decides: two ranks may have different ones, and must take the same sums.

    Args:
        mesh: The axis.
        name: The class of the module whose forward runs.
    """

    def width_of(self, x: torch.Tensor) -> Width | None:
        """The width that was noted on a tensor."""
        found: Width | None = x.__dict__.get(_WIDTH)
        return found

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function and notes the width on what comes out as wide as what went in."""
        output = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _OTHER_DIMS:
            return output
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        width = next((w for x in tensors if (w := self.width_of(x)) is not None), None)
        if width is None:
            return output
        parts = output if isinstance(output, tuple | list) else (output,)
        if all(isinstance(x, torch.Tensor) and x.ndim for x in parts):
            if all(x.shape[-1] == width.local for x in parts):
                note_width(parts, width)
            elif width.counted is None and {len(parts) * x.shape[-1] for x in parts} == {
                width.local
            }:  # a fused layer: gate and up
                note_width(parts, Width(parts[0].shape[-1], width.whole // len(parts)))
        return output


_WIDTH = "_plait_width"
_PRODUCTS = (
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
)
_TURNS = ("transpose", "transpose_", "permute", "swapaxes", "swapdims", "movedim", "t")
_CHOICES = ("embedding", "gather", "index_select", "topk", "scaled_dot_product_attention")
_OTHER_DIMS = frozenset(_PRODUCTS + _TURNS + _CHOICES)
"""Functions after which the last dim is another one."""


def note_width(parts: Any, width: Width) -> None:
    """Note on tensors that their last dim is split."""
    for x in parts:
        x.__dict__[_WIDTH] = width
