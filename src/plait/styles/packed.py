"""Fused linear layers: several matrices packed into one weight.

`gate_up_proj` holds the gate's and the up projection's rows one after the other, `qkv_proj` those
of q, k and v. A plain cut would give rank 0 the gate and rank 1 the up projection. These styles cut
every packed part by itself, so that a rank's output is `[gate_local, up_local]` and the `chunk` or
`split` in the model's own code stays right.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from plait.errors import PlanError
from plait.plan.intervals import ParamLayout, aligned, packed
from plait.run.torch_private import StridedShard
from plait.styles.activations import to_replicate
from plait.styles.heads import place_layout
from plait.styles.layer import Args, Kwargs, TensorParallelLayer, first_input
from plait.styles.linear import RowwiseParallel
from plait.styles.params import place
from plait.styles.quantized import (
    SCALES,
    has_block_scales,
    is_quantized,
    layout_of_scales,
    refuse_cut_blocks,
)
from plait.styles.registry import ALL_PARALLEL_STYLES


class PackedParallel(TensorParallelLayer):
    """What both packed styles share: which parts a parameter has and how it is cut.

    Args:
        split_factor: Number of parts of equal size.
        sections: Sizes of parts that are not equal, in any common unit: `(4, 1, 1)` for 8 query
            and 2 + 2 key/value heads. Overrides `split_factor`.
    """

    style_name = "packed"

    def __init__(self, *, split_factor: int = 2, sections: Sequence[int] | None = None) -> None:
        if split_factor < 1 or (sections is not None and min(sections, default=0) < 1):
            raise PlanError(
                f"{type(self).__name__}(split_factor={split_factor}, sections={sections}):",
                "a packed weight has one part or more, each of at least one row",
                "split_factor=2 for gate and up; sections=(q, k, v) for a fused qkv",
            )
        self.split_factor = split_factor
        self.sections = tuple(sections) if sections is not None else None

    def packed_dim(self, ndim: int) -> int | None:
        """The dim along which a parameter of `ndim` dims is packed, or None: it stays whole."""
        raise PlanError(f"{type(self).__name__} names no packed dim", "", "override packed_dim")

    def part_sizes(self, size: int) -> tuple[int, ...] | None:
        """Sizes of the parts of a dim of `size`, or None where they do not add up to it."""
        if self.sections is None:
            whole = size % self.split_factor == 0
            return (size // self.split_factor,) * self.split_factor if whole else None
        total = sum(self.sections)
        return tuple(s * size // total for s in self.sections) if size % total == 0 else None

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a dim that does not consist of these parts."""
        tensor = module._parameters.get(param)
        dim = None if tensor is None or tensor.ndim == 0 else self.packed_dim(tensor.ndim)
        if tensor is None or dim is None or (param == SCALES and has_block_scales(module)):
            return
        size = tensor.shape[dim]
        parts = self.part_sizes(size)
        asked = f"Style {self.style_name!r} on {parameter_name or param!r}:"
        units = self.sections or (1,) * self.split_factor
        if parts is None:
            raise PlanError(
                asked,
                f"dim {dim} of size {size} does not consist of parts in the ratio {units}",
                "register the style with the sections of this weight",
            )
        layout = self.param_layout(module, param, mesh)
        refuse_cut_blocks(module, param, layout, dim, mesh, parameter_name or param)

    def param_layout(self, module: nn.Module, param: str, mesh: DeviceMesh) -> ParamLayout | None:
        """The slices of every part that each rank holds, where torch has no placement for them."""
        tensor = module._parameters.get(param)
        dim = None if tensor is None or tensor.ndim == 0 else self.packed_dim(tensor.ndim)
        if tensor is None or dim is None:
            return None
        if param == SCALES and has_block_scales(module):
            weight = self.param_layout(module, "weight", mesh)
            return None if weight is None else layout_of_scales(module, weight)
        parts = self.part_sizes(tensor.shape[dim])
        assert parts is not None  # validate_param saw it
        if param == "weight" and (is_quantized(tensor) or has_block_scales(module)):
            return packed(tuple(tensor.shape), dim, mesh.size(), parts)
        rows = aligned(tuple(tensor.shape), dim, mesh.size(), parts, tensor.element_size())
        if rows is not None:
            return rows
        if self.sections is None and parts[0] % mesh.size() == 0:
            return None
        return packed(tuple(tensor.shape), dim, mesh.size(), parts)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Cut every part by itself.

        Equal parts that divide are a strided shard. Others have no placement of their own in torch:
        the DTensor is then a `Shard` of the weight in rank order (each rank's slices together), and
        the layout that is recorded with it says where each slice belongs.
        """
        tensor = module._parameters.get(param)
        if tensor is None:
            return
        dim = None if tensor.ndim == 0 else self.packed_dim(tensor.ndim)
        layout = self.param_layout(module, param, mesh)
        if layout is not None:
            place_layout(module, param, mesh, layout)
        elif dim is None:
            place(module, param, mesh, Replicate())
        else:
            strided = StridedShard(dim % tensor.ndim, split_factor=self.split_factor)
            place(module, param, mesh, strided)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always: the fused matmul runs on local tensors."""
        return True


class PackedColwiseParallel(PackedParallel):
    """Column-parallel fused layers: each rank has the matching slice of every packed part.

    Parameters: packed along the output features: dim 0 of a weight `[parts · out, in]` and of a
    bias, dim 1 of stacked experts `[experts, parts · out, in]`.

    Comm:
        Backward, one all-reduce of the input, shared by all modules that take the same tensor.
    """

    style_name = "packed_colwise"

    def __init__(
        self,
        *,
        use_local_output: bool = True,
        split_factor: int = 2,
        sections: Sequence[int] | None = None,
    ) -> None:
        super().__init__(split_factor=split_factor, sections=sections)
        self.use_local_output = use_local_output

    def packed_dim(self, ndim: int) -> int | None:
        """Output features."""
        return max(ndim - 2, 0)

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Bring the input to every rank whole."""
        x, put = first_input(module, args, kwargs)
        return put(to_replicate(x, Replicate(), mesh))

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Leave the output split, part by part."""
        if self.use_local_output or output is None:
            return output
        if self.sections is not None:
            raise PlanError(
                "PackedColwiseParallel(sections=…, use_local_output=False):",
                "torch has no placement for parts of unequal size",
                "use_local_output=True",
            )
        strided = StridedShard(output.ndim - 1, split_factor=self.split_factor)
        return DTensor.from_local(output, mesh, [strided], run_check=False)


class PackedRowwiseParallel(PackedParallel):
    """Row-parallel layers whose input features are packed parts.

    Parameters: the last dim of a weight is packed; 1-D parameters are whole on every rank, and a
    bias is added once, after the sum.

    Comm:
        Forward one all-reduce of the output. Backward nothing.
    """

    style_name = "packed_rowwise"

    def packed_dim(self, ndim: int) -> int | None:
        """Input features; a 1-D parameter stays whole."""
        return ndim - 1 if ndim > 1 else None

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Local weight, and no bias: it is added once, after the sum."""
        return _ROWWISE.context_around_forward(module, mesh)

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the terms and add the bias."""
        return _ROWWISE.transform_output_post_forward(module, output, mesh)


_ROWWISE = RowwiseParallel()
ALL_PARALLEL_STYLES.register("packed_colwise", PackedColwiseParallel())
ALL_PARALLEL_STYLES.register("packed_rowwise", PackedRowwiseParallel())
