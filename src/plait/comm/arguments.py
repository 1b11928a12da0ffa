"""What a collective is given, looked at before anything is sent."""

from collections.abc import Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from plait.comm.announced import mark_announced
from plait.comm.group import Group, transport_of
from plait.comm.sizes import chunk_sizes
from plait.errors import RankError


def local_data(x: Tensor) -> Tensor:
    """`x` without its autograd record."""
    if isinstance(x, DTensor):
        raise RankError(
            f"a collective of a DTensor {tuple(x.shape)} with placements {x.placements}",
            "collectives act on local tensors",
            ("take the local tensor with comm.local or .to_local()", "use .redistribute()"),
        )
    return x.detach() if x.requires_grad else x


def is_imaginary(x: Tensor) -> bool:
    """Whether `x` has a shape but no values, so that there is nothing to send."""
    return x.is_meta or (type(x) is not Tensor and isinstance(x, FakeTensor))


def checked_dim(kind: str, group: Group, x: Tensor, dim: int) -> int:
    """`dim` counted from the front."""
    problems = dim_problems(x, dim)
    if problems:
        raise refused(group, kind, x, problems)
    return dim % x.ndim


def checked_sizes(
    kind: str, group: Group, x: Tensor, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Sizes that fit the ranks and `x` (for a gather: this rank's piece)."""
    if sizes is None:
        return chunk_sizes(x.shape[dim], group.size)
    sizes = tuple(sizes)
    whole = None if kind == "all_gather" else x.shape[dim]
    problems = size_problems(sizes, group.size, whole)
    if not problems and whole is None and sizes[group.rank] != x.shape[dim]:
        problems = [
            f"rank {group.global_ranks[group.rank]} holds {x.shape[dim]} along dim {dim}, but by "
            f"the sizes {list(sizes)} it should hold {sizes[group.rank]}"
        ]
    if problems:
        raise refused(group, kind, x, problems)
    return sizes


def dim_problems(x: Tensor, dim: int) -> list[str]:
    """What is wrong with a dimension of `x`."""
    return [] if -x.ndim <= dim < x.ndim else [f"the tensor has {x.ndim} dimensions, not {dim}"]


def size_problems(sizes: tuple[int, ...], num_ranks: int, whole: int | None) -> list[str]:
    """What is wrong with the extents of the ranks' pieces of an extent `whole`."""
    problems = []
    if len(sizes) != num_ranks:
        problems.append(f"{len(sizes)} sizes {list(sizes)} for {num_ranks} ranks")
    if any(n < 0 for n in sizes):
        problems.append(f"a size is negative: {list(sizes)}")
    if whole is not None and sum(sizes) != whole:
        problems.append(f"the sizes {list(sizes)} add up to {sum(sizes)}, not {whole}")
    return problems


def refused(group: Group, kind: str, x: Tensor, problems: list[str]) -> RankError:
    """The error for arguments that are wrong on this rank; the peers hear of it as well."""
    error = RankError(f"{kind} of {x.dtype} {tuple(x.shape)}", problems)
    transport_of(group).refuse(f"{error.asked}: {'; '.join(problems)}")
    return mark_announced(error)
