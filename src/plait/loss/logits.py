"""Logits of which each rank holds a slice of the vocabulary, and which look whole."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from plait.comm.once import first_order
from plait.comm.raw import all_gather, split
from plait.errors import PlaitError
from plait.loss.gathered import Gathered, version_of
from plait.loss.vocabulary import Vocabulary

_WAY = "output_logits=True in the call of the model: whole logits"


class SplitLogits(Tensor):
    """Logits `[..., vocab]` of which this rank holds `[..., vocab_local]`.

    A tensor with the shape, dtype and device of the whole. What can be computed on each rank's
    slice is: scaling and capping, casts, views and slices of tokens, cross entropy. Everything else
    gathers the whole when it is used, with a gradient, and goes on with a plain tensor; what it
    changes in place comes back to the slices. So whatever a model or a loss does with it is right,
    as long as all ranks do it.

    Printing does not communicate. Pickling and `torch.save` store the whole.

    Comm:
        Forward where something gathers: one all-gather of the whole, kept for the next that asks.
        Backward nothing for it.
    """

    local: Tensor
    """`[..., vocab_local]`, with the graph."""
    vocabulary: Vocabulary
    """Which entries each rank holds."""
    vocabulary_dim: int
    """The dim of the vocabulary, counted from the last one, -1."""
    data_mesh: DeviceMesh | None
    """The ranks that see other tokens, over which a cross entropy is the mean."""
    gathered: Gathered
    """The wholes of this and of views of it."""
    _node: Any

    @staticmethod
    def of(
        local: Tensor,
        vocabulary: Vocabulary,
        dim: int = -1,
        data_mesh: DeviceMesh | None = None,
        gathered: Gathered | None = None,
    ) -> "SplitLogits":
        """Split logits of this rank's slice.

        Args:
            local: `[..., vocab_local]`, with its graph.
            vocabulary: Which entries each rank holds.
            dim: The dim of the vocabulary, negative.
            data_mesh: The ranks that see other tokens.
            gathered: The wholes of tensors that share memory with this one.
        """
        info = (vocabulary, dim, data_mesh)
        # A node in the graph as well, for those who do not come through __torch_function__.
        made: SplitLogits
        if local.requires_grad:
            made = _AsWhole.apply(local, info)  # type: ignore[no-untyped-call]
        else:
            made = _bare(local, info)
        made.local = local
        with torch._C.DisableTorchFunctionSubclass():
            made._node = made.grad_fn
        made.gathered = gathered if gathered is not None else Gathered()
        return made

    def like(self, local: Tensor, dim: int | None = None) -> "SplitLogits":
        """Another slice of the same vocabulary, computed from this one or a view of it."""
        shares = _shares_memory(local, self.local)
        dim = self.vocabulary_dim if dim is None else dim
        return SplitLogits.of(
            local, self.vocabulary, dim, self.data_mesh, self.gathered if shares else None
        )

    def whole(self) -> Tensor:
        """The whole logits, a plain tensor with a gradient; the same object when asked again.

        Comm: forward one all-gather of the whole; backward nothing.
        """
        settled = self.settled()
        if not isinstance(settled, SplitLogits):
            return settled
        return self.gathered.whole(self.local, self.vocabulary, self.vocabulary_dim)

    def settled(self) -> Tensor:
        """These logits after what was done to their whole; plain where only the whole is known."""
        with torch._C.DisableTorchFunctionSubclass():
            foreign = self.grad_fn is not self._node  # an autograd function of somebody's made it
        if foreign:
            whole: Tensor = _Whole.apply(self)  # type: ignore[no-untyped-call]
            return whole
        self.gathered.settle()
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, device = tuple(self.shape), self.local.device
        first, stop = self.vocabulary.start, self.vocabulary.start + self.vocabulary.local
        return (
            f"SplitLogits({shape}, entries {first} to {stop} of {self.vocabulary.whole} on this "
            f"rank, dtype={self.dtype}, device={str(device)!r})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitLogits":
        local = copy.deepcopy(self.local, memo)
        return SplitLogits.of(local, self.vocabulary, self.vocabulary_dim, self.data_mesh)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers what a slice can answer; all else is asked of the whole."""
        from plait.loss.answers import answer

        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operators that do not come through `__torch_function__`: those of code outside Python."""
        kwargs = kwargs or {}
        if func in _SAME:
            x = args[0]
            return _bare(x.local.detach(), (x.vocabulary, x.vocabulary_dim, x.data_mesh))
        if func._schema.is_mutable and _is_changed(func, args, kwargs):
            raise PlaitError(f"{func} on split logits:", "it changes the whole in place", _WAY)
        args, kwargs = tree_map_only(SplitLogits, _values, (args, kwargs))
        return func(*args, **kwargs)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_Info = tuple[Vocabulary, int, DeviceMesh | None]


def _bare(local: Tensor, info: _Info) -> SplitLogits:
    """Split logits without a graph."""
    vocabulary, dim, data_mesh = info
    shape = list(local.shape)
    shape[dim] = vocabulary.whole
    made: SplitLogits = Tensor._make_wrapper_subclass(
        SplitLogits, shape, dtype=local.dtype, device=local.device
    )
    made.local, made._node, made.gathered = local, None, Gathered()
    made.vocabulary, made.vocabulary_dim, made.data_mesh = vocabulary, dim, data_mesh
    return made


def _values(x: SplitLogits) -> Tensor:
    """The numbers of the whole; the graph is that of the caller."""
    local, vocabulary = x.local.detach(), x.vocabulary
    if vocabulary.mesh is None:
        return local
    return all_gather(local, vocabulary.mesh, x.vocabulary_dim, vocabulary.sizes)


def _is_changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed and isinstance(value, SplitLogits):
            return True
    return False


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    if x.device.type == "meta":
        return x is y
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class _AsWhole(Function):
    """A rank's slice as the whole: the gradient of the whole becomes that of the slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, info: _Info) -> Tensor:
        ctx.info, ctx.local, ctx.version = info, local, version_of(local)
        return _bare(local.detach(), info)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        vocabulary, dim, _ = ctx.info
        if version_of(ctx.local) != ctx.version:
            raise PlaitError(
                "The gradient of an autograd function of your own on split logits:",
                "these were changed in place, and the gradient would not know",
                _WAY,
            )
        if isinstance(grad, SplitLogits):
            return grad.local, None
        if vocabulary.mesh is None:
            return grad, None
        return split(grad, vocabulary.mesh, dim, vocabulary.sizes), None


class _Whole(Function):
    """The whole of split logits whose graph is not that of their slice."""

    @staticmethod
    def forward(ctx: Any, x: SplitLogits) -> Tensor:
        return _values(x).clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad
