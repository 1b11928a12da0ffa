"""Attention on one rank that holds all keys of its queries."""

from typing import Any

import torch
from torch import Tensor

from plait.attention.kernels import Settings, backward_block, forward_block
from plait.attention.sinks import grad_of_sinks, with_sinks_
from plait.attention.work import Work
from plait.comm.once import first_order


def attend(
    q: Tensor, k: Tensor, v: Tensor, work: Work, settings: Settings, sinks: Tensor | None = None
) -> Tensor:
    """Attention by blocks.

    Args:
        q: `[batch, heads, q, qk_dim]`.
        k: `[batch, kv_heads, k, qk_dim]`; `kv_heads` divide `heads`.
        v: `[batch, kv_heads, k, v_dim]`.
        work: Which blocks; from `work_of`.
        settings: Scale and softcap.
        sinks: `[heads]`, a score of each head that takes part in the softmax and gives no value
            (GPT-OSS); None: there are none.

    Returns:
        `[batch, heads, q, v_dim]` in `q`'s dtype; 0 for queries that see no key.

    Comm: none.
    """
    out: Tensor = _Attend.apply(q, k, v, work, settings, sinks)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Work,
        settings: Settings,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.work, ctx.settings = work, settings
        out, lse = forward_block(q, k, v, work, settings)
        with_sinks_(out, lse, sinks)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        return result

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grads = backward_block(grad_out, (q, k, v), (out, lse), ctx.work, ctx.settings)
        found = [grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)]
        return *found, None, None, grad_of_sinks(grad_out, out, lse, sinks)
