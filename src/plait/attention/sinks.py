"""Attention sinks: a learned score of each head that takes part in the softmax, without a value.

The softmax over the keys and the sink is that over the keys times `exp(lse - lse_with_sink)`. With
the output and log-sum-exp so changed, the backward of the blocks needs to know nothing of sinks.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), and the
    learned form of GPT-OSS (OpenAI, 2025).
"""

import torch
from torch import Tensor


def with_sinks_(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Let the sinks take part, in place.

    Args:
        out: `[batch, heads, q, v_dim]`, the output over the keys.
        lse: `[batch, heads, q]`, their log-sum-exp.
        sinks: `[heads]`, or None.
    """
    if sinks is not None:
        both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out.mul_((lse - both).exp().unsqueeze(-1))
        lse.copy_(both)


def grad_of_sinks(
    grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """The gradient of the sinks: minus their weight times `sum(grad_out * out)`.

    Args:
        grad_out: `[batch, heads, q, v_dim]`.
        out: The output with sinks.
        lse: The log-sum-exp with sinks.
        sinks: `[heads]`, or None.

    Returns:
        `[heads]`, or None.
    """
    if sinks is None:
        return None
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
