"""Pieces of any sizes between all ranks of an axis, and blocks that travel around it."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import counting
from plait.comm.arguments import is_imaginary, local_data, refused
from plait.comm.group import Group, group_of, transport_of
from plait.comm.once import first_order
from plait.errors import RankError

Shape = Sequence[int]


def all_to_all(pieces: Sequence[Tensor], mesh: DeviceMesh, shapes: Sequence[Shape]) -> list[Tensor]:
    """Give every rank of an axis a piece, and take what every rank gives this one.

    Args:
        pieces: One for each rank, in rank order, of one dtype; any shapes, also empty ones.
        mesh: The axis, a 1-D mesh.
        shapes: The shape of what comes from each rank.

    Returns:
        What each rank has sent, contiguous; the own piece is a copy.

    Raises:
        RankError: The pieces are not one for each rank, their dtypes differ, a rank expects
            something else than another sends, or a rank died or did not come in time.

    Comm:
        One all-to-all. The bytes that leave this rank are those of the pieces for others.
    """
    group = group_of(mesh)
    local = [local_data(piece) for piece in pieces]
    _check(group, local, shapes)
    if group.size == 1:
        return [local[0].clone(memory_format=torch.contiguous_format)]
    if counting.is_counting():
        away = sum(x.numel() for r, x in enumerate(local) if r != group.rank)
        counting.record("all_to_all", away * local[0].element_size())
    if is_imaginary(local[0]):
        return [local[0].new_empty(tuple(shape)) for shape in shapes]
    flat = [x.resolve_conj().resolve_neg().reshape(-1) for x in local]
    received = transport_of(group).all_to_all(flat, tuple(math.prod(shape) for shape in shapes))
    return [x.view(tuple(shape)) for x, shape in zip(received, shapes, strict=True)]


def _check(group: Group, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    problems = []
    for what, found in (("pieces", pieces), ("shapes", shapes)):
        if len(found) != group.size:
            problems.append(f"{len(found)} {what} for {group.size} ranks")
    dtypes = {str(piece.dtype).removeprefix("torch.") for piece in pieces}
    if len(dtypes) > 1:
        problems.append(f"the pieces are of several dtypes: {', '.join(sorted(dtypes))}")
    if any(extent < 0 for shape in shapes for extent in shape):
        problems.append(f"a shape has a negative extent: {[tuple(shape) for shape in shapes]}")
    if not problems and math.prod(shapes[group.rank]) != pieces[group.rank].numel():
        problems.append(
            f"this rank's own piece has {pieces[group.rank].numel()} elements, but "
            f"{tuple(shapes[group.rank])} is expected of it"
        )
    if problems:
        like = pieces[0] if pieces else torch.empty(0)
        raise refused(group, "all_to_all", like, problems)


class _Exchange(Function):
    """Its own partner: gradients go back the way the pieces came."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, shapes: Sequence[Shape], *pieces: Tensor) -> Any:
        ctx.mesh, ctx.shapes = mesh, [piece.shape for piece in pieces]
        return tuple(all_to_all(pieces, mesh, shapes))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # A missing gradient arrives as zeros, so that every rank takes part.
        return None, None, *all_to_all(grads, ctx.mesh, ctx.shapes)


def exchange_pieces(
    pieces: Sequence[Tensor], mesh: DeviceMesh, shapes: Sequence[Shape]
) -> list[Tensor]:
    """As [`all_to_all`][plait.comm.all_to_all], differentiable.

    Args:
        pieces: One for each rank, of one dtype.
        mesh: The axis, a 1-D mesh.
        shapes: The shape of what comes from each rank.

    Returns:
        What each rank has sent.

    Raises:
        RankError: As `all_to_all`.

    Comm:
        Forward one all-to-all, backward another, each the other way round. All ranks must run the
        backward.
    """
    if torch.is_grad_enabled() and any(piece.requires_grad for piece in pieces):
        return list(_Exchange.apply(mesh, shapes, *pieces))  # type: ignore[no-untyped-call]
    return all_to_all(pieces, mesh, shapes)


class Pending:
    """A message of a ring that is on its way."""

    def __init__(
        self, group: Group, works: Sequence[Any], kept: Any, buffer: Tensor | None, shapes: Any
    ) -> None:
        self._group, self._works, self._kept = group, works, kept
        self._buffer, self._shapes = buffer, shapes

    def wait(self) -> list[Tensor]:
        """What the previous rank has sent; empty where nothing comes.

        Raises:
            RankError: The other rank has left, or did not come in time.
        """
        for work in self._works:
            try:
                with counting.unseen():
                    work.wait()
            except RuntimeError as error:
                raise _lost(self._group, error) from error
        self._works, self._kept = (), None
        if self._buffer is None:
            return []
        parts = self._buffer.split([math.prod(shape) for shape in self._shapes])
        return [x.view(tuple(shape)) for x, shape in zip(parts, self._shapes, strict=True)]


class Ring:
    """The ranks of an axis in a circle: each sends to the next one.

    Messages go through torch's point-to-point calls on the group of the axis. The link of one host
    has steps that all ranks take together, which is what a ring must not wait for.

    Args:
        mesh: The axis, a 1-D mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = group_of(mesh)
        self._tags = itertools.count()

    def start(
        self,
        tensors: Sequence[Tensor] | None,
        shapes: Sequence[Shape] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Pending:
        """Begin to send to the next rank and to receive from the previous one, and go on.

        Args:
            tensors: What is sent, as one message, of one dtype; None: nothing. It must not be
                modified before `wait`.
            shapes: Shapes of what comes; None: nothing does. Both ranks must see it alike, and all
                ranks of the ring must call `start` equally often.
            dtype: Of what travels.
            device: Where it is.

        Raises:
            RankError: The group has ended.

        Comm:
            One message of the tensors' bytes to the next rank, if there are any.
        """
        group, tag = self._group, next(self._tags)
        send = None if tensors is None else torch.cat([x.reshape(-1) for x in tensors])
        if send is not None and send.dtype != dtype:
            raise RankError(
                f"a shift of {dtype} on rank {group.global_ranks[group.rank]}:",
                f"the tensors are of {send.dtype}",
            )
        if send is not None and counting.is_counting():
            counting.record("shift", send.numel() * send.element_size())
        buffer = None
        if shapes is not None:
            numel = sum(math.prod(shape) for shape in shapes)
            buffer = torch.empty(numel, dtype=dtype, device=device)
        pg, operations = group.process_group, []
        after = group.global_ranks[(group.rank + 1) % group.size]
        before = group.global_ranks[(group.rank - 1) % group.size]
        if send is not None and send.numel():
            operations.append(dist.P2POp(dist.isend, send, after, pg, tag))
        if buffer is not None and buffer.numel():
            operations.append(dist.P2POp(dist.irecv, buffer, before, pg, tag))
        try:
            with counting.unseen():
                works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise _lost(group, error) from error
        return Pending(group, works, send, buffer, shapes)


def _lost(group: Group, error: RuntimeError) -> RankError:
    text = str(error).strip()
    return RankError(
        f"a shift around ranks {list(group.global_ranks)}, on rank "
        f"{group.global_ranks[group.rank]}",
        text.splitlines()[0] if text else "it failed",
        "look at the first error of the other ranks: one of them left or did not send",
    )
