"""What a plan would do to a model, from the model on the meta device: no ranks, no weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.build.checks import check
from plait.build.compose import plan_for
from plait.build.names import names_of
from plait.build.rules import TpPlan
from plait.build.tracing import PREDICTED, trace
from plait.plan import Entry, ModelNames, Plan, matches
from plait.plan.explain import Explanation
from plait.plan.explain_parts import Call, Param, Part
from plait.plan.intervals import ParamLayout, aligned, even, packed, whole
from plait.styles import ALL_PARALLEL_STYLES
from plait.styles.embedding import EmbeddingParallel
from plait.styles.head_params import HeadEmbedding, HeadParams
from plait.styles.layer import TensorParallelLayer
from plait.styles.linear import ColwiseParallel, RowwiseParallel
from plait.styles.linear_kinds import in_dim, out_dim
from plait.styles.mla import MlaKvAProjParallel
from plait.styles.packed import PackedParallel
from plait.styles.statistics import SplitNorm
from plait.styles.whole import ReplicateParallel

_WHY = {
    "mla_kv_a_proj": "the latent is shared by all heads",
    "replicate": "a rule says replicate",
    "replicated_with_grad_allreduce": "small; its gradients are added over the ranks",
    "moe_identity_expert": "gives its input back",
}


class _Axis(DeviceMesh):
    """As much of a mesh as the checks of a plan look at; there are no processes behind it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks on the axis."""
        return self.num_ranks

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The first one."""
        return 0


def explain(
    module: nn.Module,
    tp_plan: TpPlan = None,
    num_ranks: int = 2,
    *,
    inputs: Mapping[str, Any] | None = None,
    batch: tuple[int, int] = (1, 512),
) -> Explanation:
    """What `parallelize` would do to a module over `num_ranks` ranks.

    Args:
        module: The module, not split; on the meta device, if its collectives are wanted.
        tp_plan: As for `parallelize`.
        num_ranks: Ranks to split over.
        inputs: Keyword arguments of the forward, for the collectives of a training step. None:
            these are not predicted.
        batch: Sequences and tokens of `inputs`, to be shown.

    Returns:
        The plan in numbers: shapes and bytes on each rank, heads, collectives.

    Raises:
        PlanError: The plan cannot be applied.
        LayoutError: There are more ranks than heads, or heads do not fit their projections.

    Comm: none.
    """
    plan = plan_for(module, tp_plan, num_ranks)
    check(module, plan, _Axis(num_ranks))
    names = names_of(module)
    parts = _parts(module, plan, names, num_ranks)
    calls, unknown = _calls(module, plan, inputs)
    first = next(module.parameters(), None)
    return Explanation(
        model=names.model,
        num_ranks=num_ranks,
        dtype=str(first.dtype).removeprefix("torch.") if first is not None else "",
        parts=tuple(parts),
        attention=tuple(plan.attention.values()),
        calls=calls,
        not_predicted=unknown + _unknown_shapes(plan),
        batch=batch,
    )


def _calls(
    module: nn.Module, plan: Plan, inputs: Mapping[str, Any] | None
) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    """The collectives, or why they are not known: no figure is better than a wrong one."""
    unknown = sorted({e.style for e in plan.entries} - PREDICTED)
    if unknown:
        reason = f"collectives: what the style {unknown[0]!r} does depends on its module's code"
        return (), (reason,)
    if inputs is None:
        return (), ("collectives: no inputs were given",)
    try:
        return trace(module, plan, _on_meta(inputs)), ()
    except Exception as error:  # whatever the model's own code raises
        said = (str(error).strip().splitlines() or [""])[0]
        reason = f"collectives: the forward cannot be followed without values ({said[:120]})"
        return (), (reason,)


def _unknown_shapes(plan: Plan) -> tuple[str, ...]:
    """Styles of the user's that cut parameters in a way of their own."""
    linear = (PackedParallel, ColwiseParallel, RowwiseParallel)
    known = (*linear, EmbeddingParallel, HeadEmbedding, HeadParams, SplitNorm)
    whole_too = (TensorParallelLayer.shard_param, ReplicateParallel.shard_param)
    keeps = (*whole_too, MlaKvAProjParallel.shard_param)
    found = []
    for name in sorted({entry.style for entry in plan.entries}):
        style = ALL_PARALLEL_STYLES[name]
        if not isinstance(style, known) and type(style).shard_param not in keeps:
            found.append(f"shapes: parameters with the style {name!r} are shown whole")
    return tuple(found)


def _on_meta(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


def _parts(module: nn.Module, plan: Plan, names: ModelNames, num_ranks: int) -> list[Part]:
    entries = {entry.name: entry for entry in plan.entries}
    attention = set(plan.attention)
    found = []
    for name, part in module.named_modules():
        entry = entries.get(name)
        params = tuple(
            _param(part, name, key, tensor, plan, entries, names, num_ranks)
            for key, tensor in part._parameters.items()
            if tensor is not None
        )
        if not params and entry is None:
            continue
        cut = any(p.is_cut for p in params)
        found.append(
            Part(
                name=name,
                module=type(part).__name__,
                kind=_kind(name, part, entry, attention),
                style=entry.style if entry else "",
                origin=entry.origin if entry else "",
                params=params,
                why="" if cut else _why(name, part, entry, plan),
            )
        )
    return found


def _param(
    part: nn.Module,
    owner: str,
    key: str,
    tensor: nn.Parameter,
    plan: Plan,
    entries: Mapping[str, Entry],
    names: ModelNames,
    num_ranks: int,
) -> Param:
    full = f"{owner}.{key}" if owner else key
    single, above = entries.get(full), entries.get(owner)
    entry = single if single is not None and single.kind == "param" else above
    layout = layout_of(part, key, full, entry, plan, num_ranks)
    return Param(
        name=key,
        shape=tuple(tensor.shape),
        local=tuple(layout.local_shape(rank) for rank in range(num_ranks)),
        itemsize=tensor.element_size(),
        style=single.style if single is not None and single.kind == "param" else "",
        tied=names.tied.get(full, ""),
    )


def layout_of(
    part: nn.Module, key: str, full: str, entry: Entry | None, plan: Plan, num_ranks: int
) -> ParamLayout:
    """How one parameter would lie on the ranks.

    Args:
        part: The module that holds it.
        key: Its name there.
        full: Its name in the model.
        entry: The entry of the plan that decides on it, or None.
        plan: The plan.
        num_ranks: Ranks.
    """
    tensor = part._parameters[key]
    assert tensor is not None
    shape = tuple(tensor.shape)
    style = None if entry is None else ALL_PARALLEL_STYLES[entry.style]
    found = plan.cuts.get(full, plan.cuts.get(full.rpartition(".")[0]))
    dim: int | None = None
    if isinstance(style, PackedParallel):
        dim = style.packed_dim(tensor.ndim)
        sizes = None if dim is None else style.part_sizes(shape[dim])
        if dim is not None and sizes is not None:
            stacked = aligned(shape, dim, num_ranks, sizes, tensor.element_size())
            return stacked or packed(shape, dim, num_ranks, sizes)
    elif isinstance(style, ColwiseParallel):
        dim = out_dim(part, tensor)
    elif isinstance(style, RowwiseParallel):
        dim = in_dim(part, tensor) if tensor.ndim > 1 else None
    elif isinstance(style, EmbeddingParallel):
        dim = style.shard_dim if tensor.ndim == 2 else None
    elif isinstance(style, HeadEmbedding):
        dim = 1
    elif isinstance(style, SplitNorm):
        dim = 0
    elif isinstance(style, HeadParams):
        size = None if found is None else found.size
        dim = next((d for d, extent in enumerate(shape) if extent == size), 0)
    if dim is None:
        return whole(shape)
    if found is not None:
        return found.layout(shape, dim)
    stacked = aligned(shape, dim, num_ranks, (shape[dim],), tensor.element_size())
    return stacked or even(shape, dim, num_ranks)


_EXPERTS = ("experts", "local_experts")
_MLP = ("mlp", "ffn", "feed_forward", "feedforward", "fc1", "fc2", "intermediate", "ff", "wi", "wo")
_HEADS = ("lm_head", "score", "classifier", "embed_out", "qa_outputs", "output_layer")


def _kind(name: str, part: nn.Module, entry: Entry | None, attention: set[str]) -> str:
    """What a module is for, from its class and name."""
    words, known = name.lower().split("."), type(part).__name__.lower()
    layer = any(word.isdigit() for word in words)
    if "norm" in known:
        return "norms"
    if "embedding" in known and not (layer and any("att" in word for word in words)):
        return "embedding"
    if not layer and (words[-1] in _HEADS or (entry and entry.style.startswith("colwise_"))):
        return "head"
    if any(word in _EXPERTS for word in words) or "router" in known:
        return "experts"
    above = {".".join(name.split(".")[:end]) for end in range(1, len(words) + 1)}
    if above & attention or any("attn" in w or "attention" in w for w in words):
        return "attention"
    if any(word in _MLP or "mlp" in word or "dense" in word for word in words):
        return "MLP"
    return "other"


def _why(name: str, part: nn.Module, entry: Entry | None, plan: Plan) -> str:
    """Why a module is whole on every rank."""
    above = name
    while above:
        for pattern, reason in plan.whole.items():
            if matches(pattern, above):
                return reason
        above = above.rpartition(".")[0]
    if entry is not None:
        return _WHY.get(entry.style, f"its style is {entry.style}")
    if "norm" in type(part).__name__.lower():
        return "small, and works on whole tensors"
    for key in part._parameters:
        for pattern, reason in plan.whole.items():
            if matches(pattern, f"{name}.{key}" if name else key):
                return reason
    return "no rule names it"
