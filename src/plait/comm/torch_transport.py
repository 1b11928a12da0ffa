"""Collectives through torch.distributed: NCCL between GPUs, gloo between hosts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.counting import unseen
from plait.comm.transport import Op
from plait.errors import RankError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class TorchTransport:
    """The collectives of one group through its torch process group (see `Transport`)."""

    spent = False

    def __init__(self, process_group: dist.ProcessGroup, global_ranks: tuple[int, ...]) -> None:
        self.process_group = process_group
        self.global_ranks = global_ranks
        self.rank, self.size = process_group.rank(), len(global_ranks)

    def all_reduce(self, x: Tensor, op: Op, out: Tensor | None) -> Tensor:
        """The reduction of every rank's `x`."""
        if x.device.type == "cpu" and x.dtype in _SIXTEEN_BIT:
            # gloo would add in 16 bits; the sum is rounded once, as on the link.
            total = self.all_reduce(x.float(), op, None).to(x.dtype)
            return total if out is None else out.copy_(total)
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out is not x:
            out.copy_(x)
        buffer = _whole(out)
        self._run("all_reduce", x, lambda: dist.all_reduce(buffer, _OPS[op], self.process_group))
        return out if buffer is out else out.copy_(buffer)

    def all_gather(
        self, x: Tensor, dim: int, sizes: tuple[int, ...] | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Every rank's `x` along `dim`, padded to the longest on the way."""
        if sizes is None:
            sizes = self._sizes(x, dim)
        # Every rank sends the same number of elements: shorter pieces are padded at the end.
        longest = max(sizes)
        piece = _movable(x, dim)
        padded = piece
        if piece.shape[0] < longest:
            padded = piece.new_zeros((longest, *piece.shape[1:]))
            padded[: piece.shape[0]] = piece
        gathered = padded.new_empty((self.size, *padded.shape))
        self._run(
            "all_gather",
            x,
            lambda: dist.all_gather_single(
                _wire(gathered).flatten(), _wire(padded).flatten(), self.process_group
            ),
        )
        if dim == 0 and min(sizes) == longest:
            return gathered.flatten(0, 1), sizes
        pieces = [gathered[r, :n].movedim(0, dim) for r, n in enumerate(sizes)]
        return torch.cat(pieces, dim), sizes

    def reduce_scatter(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This rank's piece of the sum, padded to the longest on the way."""
        if x.device.type == "cpu" and x.dtype in _SIXTEEN_BIT:
            return self.reduce_scatter(x.float(), dim, sizes).to(x.dtype)
        longest = max(sizes)
        moved = _movable(x, dim)
        if min(sizes) == longest:
            send = moved
        else:
            send = moved.new_zeros((self.size * longest, *moved.shape[1:]))
            for r, piece in enumerate(moved.split(sizes)):
                send[r * longest : r * longest + piece.shape[0]] = piece
        got = send.new_empty((longest, *send.shape[1:]))
        self._run(
            "reduce_scatter",
            x,
            lambda: dist.reduce_scatter_single(
                _wire(got).flatten(), _wire(send).flatten(), group=self.process_group
            ),
        )
        return got[: sizes[self.rank]].movedim(0, dim).contiguous()

    def all_to_all(self, pieces: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
        """What every rank sends this one; the own piece does not travel."""
        away = [piece if r != self.rank else piece[:0] for r, piece in enumerate(pieces)]
        send = _wire(torch.cat(away))
        counts = [n if r != self.rank else 0 for r, n in enumerate(lengths)]
        got = send.new_empty((sum(counts), *send.shape[1:]))
        self._run(
            "all_to_all",
            send,
            lambda: dist.all_to_all_single(
                got, send, counts, [piece.numel() for piece in away], group=self.process_group
            ),
        )
        whole = torch.view_as_complex(got) if pieces[0].is_complex() else got
        result = list(whole.split(counts))
        result[self.rank] = pieces[self.rank].clone()
        return result

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The `x` of group rank `src`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        self._run(
            "broadcast",
            x,
            lambda: dist.broadcast(out, group=self.process_group, group_src=src),
        )
        return out

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's object, through torch's object collectives."""
        objects: list[Any] = [None] * self.size
        with unseen():
            try:
                dist.all_gather_object(objects, obj, self.process_group)
            except RuntimeError as error:
                raise self._failed("exchange of a control message", error) from error
        return objects

    def announce_failure(self, message: str) -> bool:
        """Nothing is done: torch.distributed offers no way to wake a rank that waits."""
        return False

    def raise_if_final(self) -> None:
        """Nothing to do: this transport is never spent."""

    def refuse(self, message: str) -> None:
        """Nothing to do: the peers find out when their own call fails or times out."""

    def set_timeout(self, seconds: float) -> None:
        """Nothing to do: the process group keeps the limit it was made with."""

    def close(self) -> None:
        """Nothing to do."""

    def _sizes(self, x: Tensor, dim: int) -> tuple[int, ...]:
        """Ask every rank how long its piece is (only where the caller did not say)."""
        mine = torch.tensor([x.shape[dim]], device=x.device)
        every = mine.new_empty(self.size)
        self._run(
            "all_gather (of sizes)",
            x,
            lambda: dist.all_gather_single(every, mine, self.process_group),
        )
        return tuple(every.tolist())

    def _run(self, kind: str, x: Tensor, collective: Callable[[], object]) -> None:
        try:
            with unseen():
                collective()
        except RuntimeError as error:
            raise self._failed(f"{kind} of a {x.dtype} tensor {tuple(x.shape)}", error) from error

    def _failed(self, what: str, error: RuntimeError) -> RankError:
        me = self.global_ranks[self.rank]
        return RankError(
            f"{what} among ranks {list(self.global_ranks)}, on rank {me}",
            str(error).strip().splitlines()[0] if str(error).strip() else "it failed",
            "look at the first error of the other ranks: one of them left or asked for another "
            "shape",
        )


def _movable(x: Tensor, dim: int) -> Tensor:
    """`x` with `dim` in front, contiguous."""
    return _whole(x.movedim(dim, 0))


def _whole(x: Tensor) -> Tensor:
    """`x` contiguous and without a pending conjugation; `x` itself where it is."""
    return x.resolve_conj().resolve_neg().contiguous()


def _wire(x: Tensor) -> Tensor:
    """Complex numbers travel as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x
