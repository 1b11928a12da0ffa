"""The collectives of a training step, found by one forward of the whole model on the meta device.

Nothing is computed and no rank is needed: a call of each module that has a style shows the shapes
of what it would communicate, and which modules take the same tensor and so share a border. The
graph of the loss shows which of them a backward reaches.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.build.traced_statistics import Statistics
from plait.loss import asking
from plait.loss.kernel import accumulation_dtype
from plait.plan import Plan
from plait.plan.cuts import Cut
from plait.plan.explain_parts import Call
from plait.plan.roles import FUSED
from plait.proof.numbers import tensors

BORDER = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", *FUSED})
SUMMED = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"})
SLICED = frozenset({"rowwise_rep", "rowwise_split_input"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
SILENT = frozenset({"replicate", "local_params", "head_params", "head_embedding"})
PREDICTED = (
    BORDER
    | SUMMED
    | SILENT
    | {
        "all_reduce",
        "embedding_colwise",
        "embedding_rowwise",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicated_with_grad_allreduce",
        "split_norm",
    }
)
"""Styles whose collectives are known before they run."""


def trace(module: nn.Module, plan: Plan, batch: Mapping[str, Any]) -> tuple[Call, ...]:
    """The collectives of one training step, in the order in which the forward meets their modules.

    Args:
        module: The whole model, on the meta device.
        plan: Its plan, for a number of ranks.
        batch: Keyword arguments of its forward, on the meta device.

    Raises:
        Exception: Whatever the model's forward raises where it needs the values of tensors.

    Comm: none.
    """
    found = _Trace(plan)
    heads = set(map(id, asking.heads(module))) if asking.LABELS & batch.keys() else set()
    found.split = frozenset(name for name, part in module.named_modules() if id(part) in heads)
    with found.watching(module), torch.enable_grad():
        output = module(**batch)
    return found.calls(_root(output))


def _root(output: Any) -> Tensor | None:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return next((x for _, x in tensors(output) if x.grad_fn is not None), None)


class _Pending:
    """A collective, the modules that cause it, and the graph's nodes of what comes out of them."""

    def __init__(self, phase: Literal["forward", "backward"], kind: str, size: int, what: str):
        self.phase, self.kind, self.size, self.what = phase, kind, size, what
        self.modules: list[str] = []
        self.outputs: list[Any] = []

    def of(self, name: str, output: Any) -> None:
        """Add one module that causes it."""
        self.modules.append(name)
        self.outputs.append(output.grad_fn if isinstance(output, Tensor) else None)


class _Trace:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pending: list[_Pending] = []
        self.borders: dict[tuple[int, int], _Pending] = {}
        self.inputs: dict[str, list[Any]] = {}
        self.kept: list[Any] = []  # so that no id is used twice
        self.summed: dict[str, list[str]] = {}
        self.split: frozenset[str] = frozenset()  # heads whose logits stay split
        for entry in plan.entries:
            if entry.kind == "param" and entry.style == "replicated_with_grad_allreduce":
                owner, _, name = entry.name.rpartition(".")
                self.summed.setdefault(owner, []).append(name)

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Hooks on every module that communicates; gone afterwards."""
        modules = dict(module.named_modules())
        styles = {e.name: e.style for e in self.plan.entries if e.kind == "module"}
        single = {e.name.rpartition(".")[0] for e in self.plan.entries if e.kind == "param"}
        handles: list[Any] = []
        forwards: list[tuple[nn.Module, Any]] = []
        try:
            for name in [*styles, *(single - styles.keys())]:
                part, style = modules[name], styles.get(name, "")
                forward = self._replacement(name, part, style)
                if forward is not None:
                    forwards.append((part, part.__dict__.get("forward")))
                    part.__dict__["forward"] = forward
                handles.append(part.register_forward_pre_hook(self._before(name), with_kwargs=True))
                handles.append(part.register_forward_hook(self._after(name, style)))
            for name in self.plan.attention:
                hook = _refuse_bias_by_head(self.plan, name)
                handles.append(modules[name].register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part, before in forwards:
                part.__dict__["forward"] = before
                if before is None:
                    del part.__dict__["forward"]

    def _replacement(self, name: str, part: nn.Module, style: str) -> Callable[..., Any] | None:
        if style == "moe_tp_experts":
            return _experts
        if style != "split_norm":
            return None
        width = next(p.shape[0] for p in part._parameters.values() if p is not None)
        inner = part.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with Statistics(int(width)) as seen:
                output = inner(*args, **kwargs)
            for rows, size, records in seen.found:
                what = f"statistics of {rows:,} rows"
                self._add("forward", "all_reduce", size, what, name, output)
                if records:
                    self._add("backward", "all_reduce", size, f"gradient of {what}", name, output)
            return output

        return forward

    def _before(self, name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            # The version as it is now: a layer may change what it was given.
            self.inputs[name] = [(x, x._version) for x in given]
            self.kept += given

        return hook

    def _after(self, name: str, style: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            self.kept.append(first)
            self._shared(name, part, first)
            self._summed(name, part, style, first)
            self._styled(name, style, first)

        return hook

    def _styled(self, name: str, style: str, output: Any) -> None:
        given = self.inputs.get(name, [])
        if style in BORDER:
            self._border(given[0], name, output, "gradient of the input")
        if style == "moe_tp_experts":
            for number, x in enumerate(given):
                what = "routing weights" if number else "hidden states"
                self._border(x, name, output, f"gradient of the {what}")
        if style in SLICED and given[0][0].requires_grad:
            what = "gradient of the input"
            self._add("backward", "all_gather", _bytes(given[0][0]), what, name, output)
        if style in GATHERED and name in self.split:
            size = output.shape[:-1].numel() * accumulation_dtype(output.dtype).itemsize
            self._add("forward", "all_reduce", size, "maxima for the loss", name, output)
            self._add("forward", "all_reduce", 2 * size, "sums for the loss", name, output)
        elif style in GATHERED or style == "embedding_colwise":
            self._add("forward", "all_gather", _bytes(output), "output", name, output)
        summed = ("embedding_rowwise", "moe_tp_experts", "all_reduce")
        if style in SUMMED or style in summed:
            self._add("forward", "all_reduce", _bytes(output), "sum of the output", name, output)
        if style == "mla_kv_a_proj" and output.requires_grad:
            size = _bytes(output) // output.shape[-1] * self.plan.rope_dims[name]
            self._add("backward", "all_reduce", size, "gradient of the rotary key", name, output)

    def _border(self, given: tuple[Tensor, int], name: str, output: Any, what: str) -> None:
        x, version = given
        if not x.requires_grad:
            return
        known = None if x.is_leaf else self.borders.get((id(x), version))
        if known is None:
            known = _Pending("backward", "all_reduce", _bytes(x), what)
            self.pending.append(known)
            self.borders[id(x), version] = known
        known.of(name, output)

    def _summed(self, name: str, part: nn.Module, style: str, output: Any) -> None:
        """Gradients of whole parameters that are added over the ranks."""
        every = list(part._parameters) if style == "replicated_with_grad_allreduce" else []
        for key in dict.fromkeys([*every, *self.summed.get(name, ())]):
            param = part._parameters.get(key)
            if param is not None and param.requires_grad:
                what = f"gradient of {key}"
                self._add("backward", "all_reduce", _bytes(param), what, name, output)

    def _shared(self, name: str, part: nn.Module, output: Any) -> None:
        """Rows of key/value heads that several ranks need."""
        for key, param in part._parameters.items():
            found = self.plan.cuts.get(f"{name}.{key}", self.plan.cuts.get(name))
            if param is None or found is None or not found.is_shared:
                continue
            size = _bytes(param) // found.size * shared_size(found)
            what = f"shared rows of {key}"
            self._add("forward", "all_gather", size, what, name, output)
            if param.requires_grad:
                self._add("backward", "reduce_scatter", size, f"gradient of {what}", name, output)

    def _add(
        self,
        phase: Literal["forward", "backward"],
        kind: str,
        size: int,
        what: str,
        name: str,
        output: Any,
    ) -> None:
        made = _Pending(phase, kind, size, what)
        made.of(name, output)
        self.pending.append(made)

    def calls(self, root: Tensor | None) -> tuple[Call, ...]:
        """What is communicated, without what no gradient reaches."""
        reached = _reached(root)
        found = []
        for call in self.pending:
            if call.phase == "backward":
                names = [
                    name
                    for name, node in zip(call.modules, call.outputs, strict=True)
                    if node is None or node in reached
                ]
            else:
                names = call.modules
            if names:
                found.append(Call(tuple(names), call.phase, call.kind, call.size, call.what))
        return tuple(found)


def _refuse_bias_by_head(plan: Plan, name: str) -> Callable[..., None]:
    """Where a rank takes its rows of a bias by head, how the gradient comes back is not known."""
    num_heads = plan.attention[name].heads.num_heads
    split = any(entry.style == "head_embedding" for entry in plan.entries)

    def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
        for x in (*args[1:], *kwargs.values()):
            by_head = isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] == num_heads > 1
            if by_head and x.requires_grad and not split:
                raise RuntimeError(f"{name} takes a trained bias with a row for every head")

    return hook


def shared_size(cut: Cut) -> int:
    """Indices of a dimension that more than one rank needs."""
    ends = sorted({at for pieces in cut.need for piece in pieces for at in piece})
    total = 0
    for start, stop in pairwise(ends):
        users = sum(any(a <= start < b for a, b in pieces) for pieces in cut.need)
        total += (stop - start) * (users > 1)
    return total


def _experts(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for experts, whose own code needs to know the routing."""
    output = hidden_states.clone()
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.requires_grad:
            output = output + x.sum().to(output.dtype)
    return output


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _reached(root: Tensor | None) -> set[Any]:
    """The nodes of autograd's graph that the backward of `root` runs."""
    if root is None or root.grad_fn is None:
        return set()
    seen: set[Any] = {root.grad_fn}
    todo = [root.grad_fn]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return seen
