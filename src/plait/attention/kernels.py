"""Attention of one block of scores, forward and backward, with the log-sum-exp that joins blocks.

Sources: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), for joining parts
    of a softmax; Dao et al., "FlashAttention" (2022), for a backward from the log-sum-exp: with
    `p = exp(s - lse)` and `delta = sum(grad_out * out)`, the gradient of the scores is
    `p * (grad_out @ v.T - delta)`. With the `lse` and `out` of the whole sequence each block gives
    its own share of the gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.attention.work import Job, Work

Triple = tuple[Tensor, Tensor, Tensor]
_INF = torch.inf


@dataclass(frozen=True)
class Settings:
    """What all blocks of one attention have in common.

    Attributes:
        scale: Factor of the scores.
        softcap: Scores become `softcap * tanh(score / softcap)`; None: they stay (Gemma 2).
    """

    scale: float
    softcap: float | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, work: Work, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys.

    Args:
        q: `[batch, heads, q, qk_dim]`.
        k: `[batch, kv_heads, k, qk_dim]`; `kv_heads` divide `heads`.
        v: `[batch, kv_heads, k, v_dim]`.
        work: The blocks.
        settings: Scale and softcap.

    Returns:
        The output as if there were no other keys, `[batch, heads, q, v_dim]`, and the log-sum-exp
        of the scores, `[batch, heads, q]`, both in float32 (float64 for float64). Queries that see
        no key: 0 and -inf.

    Comm: none.
    """
    dtype = wide(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = q.new_full(q.shape[:-1], -_INF, dtype=dtype)
    for job in work.jobs if q.numel() else ():  # a rank may have no head
        found = _kernel(q, v, settings).forward(*_taken(job, q, k, v), _bias(job, q), job, settings)
        rows = _rows(job, q)
        if rows is None:
            merge_(out[:, :, slice(*job.q)], lse[:, :, slice(*job.q)], *found)
            continue
        part = out[rows, :, slice(*job.q)], lse[rows, :, slice(*job.q)]
        merge_(*part, *found)
        out[rows, :, slice(*job.q)], lse[rows, :, slice(*job.q)] = part
    return out, lse


def backward_block(
    grad_out: Tensor, qkv: Triple, whole: tuple[Tensor, Tensor], work: Work, settings: Settings
) -> Triple:
    """The share of one block in the gradients.

    Args:
        grad_out: `[batch, heads, q, v_dim]`.
        qkv: What `forward_block` was given.
        whole: The output, in any dtype, and the log-sum-exp over *all* keys of the sequence.
        work: The blocks.
        settings: As for the forward.

    Returns:
        The gradients of q, k and v in float32 (float64 for float64).

    Comm: none.
    """
    q, k, v = qkv
    dtype = wide(q.dtype)
    grads = tuple(torch.zeros_like(x, dtype=dtype) for x in qkv)
    for job in work.jobs if q.numel() else ():
        rows, at_q, at_k = _rows(job, q), slice(*job.q), slice(*job.k)
        here = [x if rows is None else x[rows] for x in (grad_out, *whole)]
        given, out, lse = (x[:, :, at_q] for x in here)
        lse = torch.where(lse == -_INF, 0.0, lse)  # nobody sees anything there: exp(-inf - 0) = 0
        found = _kernel(q, v, settings).backward(
            given, _taken(job, q, k, v), (out, lse), _bias(job, q), job, settings
        )
        for total, part, at in zip(grads, found, (at_q, at_k, at_k), strict=True):
            if rows is None:
                total[:, :, at] += part
            else:
                total[rows, :, at] += part.to(dtype)
    return grads[0], grads[1], grads[2]


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Join the attention to some keys with that to others, in place.

    Args:
        out: `[…, v_dim]`, float32 or float64; becomes the output for all keys.
        lse: `[…]`; becomes the log-sum-exp of all.
        new_out: The output for the other keys.
        new_lse: Their log-sum-exp; -inf where there are none.
    """
    both = torch.logaddexp(lse, new_lse)
    safe = torch.where(both == -_INF, 0.0, both)
    out.mul_((lse - safe).exp().unsqueeze(-1))
    out.add_(new_out * (new_lse - safe).exp().unsqueeze(-1))
    lse.copy_(both)


@dataclass(frozen=True)
class _Kernel:
    """How one block is computed: forward gives (out, lse), backward three gradients."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Triple]


def _kernel(q: Tensor, v: Tensor, settings: Settings) -> _Kernel:
    if settings.softcap is not None:
        return _PLAIN
    if q.device.type == "cpu" and q.shape[-1] >= v.shape[-1]:
        return _FLASH_CPU
    return _PLAIN


def _rows(job: Job, q: Tensor) -> Tensor | None:
    return None if job.rows is None else torch.tensor(job.rows, device=q.device)


def _taken(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Triple:
    rows = _rows(job, q)
    if rows is not None:
        q, k, v = q[rows], k[rows], v[rows]
    at = slice(*job.k)
    return q[:, :, slice(*job.q)], k[:, :, at], v[:, :, at]


def _bias(job: Job, q: Tensor) -> Tensor | None:
    """`[1, 1, q, k]` to be added to scores: 0 where a query sees a key, else -inf."""
    if job.mask is None:
        return None
    mask = job.mask.to(q.device)
    zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return zeros.masked_fill_(~mask, -_INF)[:, None]


def _flash_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, job: Job, settings: Settings
) -> tuple[Tensor, Tensor]:
    v_dim, dtype = v.shape[-1], wide(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, _as_wide(v, q), 0.0, job.kind == "causal", attn_mask=bias, scale=settings.scale
    )
    out, lse = out[..., :v_dim].to(dtype), lse.to(dtype)
    if job.mask is not None:  # the kernel gives 0 for a row without keys
        lse = lse.masked_fill(~job.mask.to(q.device).any(-1)[:, None], -_INF)
    return out, lse


def _flash_cpu_backward(
    grad_out: Tensor,
    qkv: Triple,
    whole: tuple[Tensor, Tensor],
    bias: Tensor | None,
    job: Job,
    settings: Settings,
) -> Triple:
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    v_dim = v.shape[-1]
    v = _as_wide(v, q)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _as_wide(grad_out, q).to(q.dtype),
        q,
        k,
        v,
        _as_wide(whole[0], q).to(q.dtype),
        whole[1],
        0.0,
        job.kind == "causal",
        attn_mask=bias,
        scale=settings.scale,
    )
    return grads[0], _summed(grads[1], group), _summed(grads[2][..., :v_dim], group)


def _as_wide(x: Tensor, q: Tensor) -> Tensor:
    """Padded with zeros to the width of queries, which the kernel wants."""
    missing = q.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _summed(grad: Tensor, group: int) -> Tensor:
    """The gradient of a key/value head: the sum over the query heads that meet it."""
    return grad if group == 1 else grad.unflatten(1, (-1, group)).sum(2)


def _scores(q: Tensor, k: Tensor, settings: Settings) -> tuple[Tensor, Any]:
    """Scores `[batch, kv_heads, group, q, k]`, and the slope of the softcap."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.matmul(grouped, k.unsqueeze(2).mT) * settings.scale
    if settings.softcap is None:
        return scores, None
    bent = torch.tanh(scores / settings.softcap)
    return bent * settings.softcap, 1 - bent * bent


def _masked(scores: Tensor, bias: Tensor | None, job: Job) -> Tensor:
    if job.kind == "causal":
        size = scores.shape[-1]
        ahead = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(ahead, -_INF)
    return scores if bias is None else scores + bias.unsqueeze(1)


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, job: Job, settings: Settings
) -> tuple[Tensor, Tensor]:
    dtype = wide(q.dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scores = _masked(_scores(q, k, settings)[0], bias, job)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -_INF, 0.0, lse).unsqueeze(-1)).exp()
    out = torch.matmul(weights, v.unsqueeze(2))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(
    grad_out: Tensor,
    qkv: Triple,
    whole: tuple[Tensor, Tensor],
    bias: Tensor | None,
    job: Job,
    settings: Settings,
) -> Triple:
    dtype = wide(qkv[0].dtype)
    q, k, v = (x.to(dtype) for x in qkv)
    shape = (k.shape[1], -1)
    given, out = (x.to(dtype).unflatten(1, shape) for x in (grad_out, whole[0]))
    lse = whole[1].unflatten(1, shape)
    scores, slope = _scores(q, k, settings)
    weights = (_masked(scores, bias, job) - lse.unsqueeze(-1)).exp()
    grad_v = torch.matmul(weights.mT, given).sum(2)
    grad_scores = torch.matmul(given, v.unsqueeze(2).mT) - (given * out).sum(-1, keepdim=True)
    grad_scores = grad_scores * weights * settings.scale
    grad_scores = grad_scores if slope is None else grad_scores * slope
    grad_q = torch.matmul(grad_scores, k.unsqueeze(2)).flatten(1, 2)
    grad_k = torch.matmul(grad_scores.mT, q.unflatten(1, shape)).sum(2)
    return grad_q, grad_k, grad_v


_FLASH_CPU = _Kernel(_flash_cpu_forward, _flash_cpu_backward)
_PLAIN = _Kernel(_plain_forward, _plain_backward)
