"""Embeddings split over the vocabulary or over the hidden dim."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plait.comm import gather_from, sum_from
from plait.errors import PlanError
from plait.plan.intervals import even
from plait.styles.activations import uneven_sizes
from plait.styles.layer import (
    TensorParallelLayer,
    bind_forward,
    border_of,
    first_input,
)
from plait.styles.params import place
from plait.styles.registry import ALL_PARALLEL_STYLES
from plait.styles.table import OwnTable


class EmbeddingParallel(TensorParallelLayer):
    """Each rank holds a slice of the table; token ids are whole on every rank.

    | `shard_dim` | weight `[vocabulary, hidden]` | forward |
    |---|---|---|
    | 0 | `Shard(0)` | rows that a rank does not hold are zero; one all-reduce of the look-ups |
    | 1 | `Shard(1)` | one all-gather of the slices of each vector |

    The module's own forward runs on the local table, so an embedding that scales its vectors keeps
    doing it.

    Args:
        shard_dim: 0 (vocabulary) or 1 (hidden).
        use_local_output: Whether a plain tensor leaves (default) or a DTensor.

    Comm:
        Forward one all-reduce (`shard_dim=0`) or all-gather (1) of the output. Backward nothing.

    Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3 (parallel input embedding).
    """

    def __init__(self, *, shard_dim: int = 0, use_local_output: bool = True) -> None:
        if shard_dim not in (0, 1):
            raise PlanError(
                f"EmbeddingParallel(shard_dim={shard_dim}):",
                "an embedding has two dims",
                "shard_dim=0 splits the vocabulary, shard_dim=1 the hidden dim",
            )
        self.shard_dim = shard_dim
        self.use_local_output = use_local_output

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse what is no embedding, and options whose result depends on the whole table."""
        problems = []
        if not isinstance(module, nn.Embedding):
            problems.append(f"{type(module).__name__} is not an nn.Embedding")
        else:
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                value = getattr(module, option, None)
                if value is not None and value is not False:
                    problems.append(f"the option {option}={value!r} needs the whole table")
        if problems:
            raise PlanError(
                f"An embedding style on {name!r}:",
                problems,
                "give it the style 'replicate'",
            )

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut the table along `shard_dim`; any other parameter stays whole."""
        tensor = module._parameters.get(param)
        if tensor is not None:
            place(module, param, mesh, Shard(self.shard_dim) if tensor.ndim == 2 else Replicate())

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: look-ups run on the local table."""
        return True

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the partial look-ups, or gather the slices of each vector."""
        if self.shard_dim == 0:
            output = sum_from(output, mesh)
        else:
            width: int = module.embedding_dim  # type: ignore[assignment]
            output = gather_from(output, mesh, dim=-1, sizes=uneven_sizes(width, mesh.size()))
        if self.use_local_output:
            return output
        return DTensor.from_local(output, mesh, [Replicate()], run_check=False)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Put the border around the forward."""
        if self.shard_dim == 0:
            return bind_forward(module, self, mesh, _vocabulary_forward)
        return super().install_forward(module, mesh)


def _vocabulary_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with OwnTable(module):
        return _look_up(module, *args, **kwargs)


def _look_up(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    border = border_of(module)
    style, mesh = border.style, border.mesh
    args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
    ids, put = first_input(module, args, kwargs)
    _check_range(ids, module.num_embeddings)  # type: ignore[arg-type]
    start, stop = vocabulary_range(module, mesh)
    # Ids of other ranks look up row 0 here and are set to zero after the module's own forward.
    elsewhere = (ids < start) | (ids >= stop)
    args, kwargs = put((ids - start).masked_fill_(elsewhere, 0))
    with style.context_around_forward(module, mesh), _LocalPadding(module, start, stop):
        if stop > start:
            output = border.call(module, *args, **kwargs)
        else:  # more ranks than rows: this rank holds none
            weight = module._parameters["weight"]
            assert weight is not None
            output = weight.new_zeros(*ids.shape, weight.shape[-1]) + weight.sum()
    output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
    return style.transform_output_post_forward(module, output, mesh)


def _check_range(ids: torch.Tensor, num_rows: int) -> None:
    """Refuse ids that no rank holds, as a whole table does; they would look up zeros."""
    if torch.compiler.is_compiling() or ids.numel() == 0 or ids.is_meta:
        return
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= num_rows:
        raise IndexError(
            f"index out of range in self: ids from {int(low)} to {int(high)} for an embedding of "
            f"{num_rows} rows"
        )


def vocabulary_range(module: nn.Module, mesh: DeviceMesh) -> tuple[int, int]:
    """First row of the table that this rank holds, and the one after its last."""
    weight = module._parameters["weight"]
    assert weight is not None
    pieces = even(tuple(weight.shape), 0, mesh.size()).pieces[mesh.get_local_rank()]
    return (pieces[0][0], pieces[-1][1]) if pieces else (0, 0)


class _LocalPadding:
    """Context in which an embedding's `padding_idx` is a row of the local table, or None."""

    __slots__ = ("local", "module", "whole")

    def __init__(self, module: nn.Module, start: int, stop: int) -> None:
        self.module = module
        self.whole: int | None = module.padding_idx  # type: ignore[assignment]
        inside = self.whole is not None and start <= self.whole < stop
        self.local = self.whole - start if inside and self.whole is not None else None

    def __enter__(self) -> None:
        self.module.__dict__["padding_idx"] = self.local

    def __exit__(self, *error: object) -> None:
        self.module.__dict__["padding_idx"] = self.whole


ALL_PARALLEL_STYLES.register("embedding_rowwise", EmbeddingParallel(shard_dim=0))
ALL_PARALLEL_STYLES.register("embedding_colwise", EmbeddingParallel(shard_dim=1))
