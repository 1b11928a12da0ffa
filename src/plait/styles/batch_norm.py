"""Batch normalisation over the samples of all data ranks."""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from plait.comm import copy_to, sum_from
from plait.styles.layer import rebind

_MESH = "_plait_batch_mesh"


def normalise_over_data(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Let batch normalisations in training take the statistics of all data ranks' samples.

    Means, variances and running statistics are those of one process over the global batch, on all
    ranks alike.

    Args:
        root: A model whose data ranks see different samples.
        mesh: The data ranks.

    Comm: in training two all-reduces of a number for each channel forward, and two backward.
    """
    if mesh is None or mesh.size() == 1:
        return
    for part in root.modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
            part.__dict__[_MESH] = mesh
            border = part.__dict__.get("_plait_border")
            if border is None:
                rebind(part, _forward)
            else:
                border.forward = MethodType(_forward, part)


def _forward(module: Any, input: torch.Tensor) -> torch.Tensor:
    """As `torch.nn.BatchNorm1d.forward`, over all ranks.

    Args:
        module: The normalisation.
        input: `[samples, channels, …]`, this rank's samples.

    Source: Ioffe, Szegedy, Batch Normalization (arXiv 1502.03167), algorithm 1.
    """
    if not (module.training or module.running_mean is None):
        found: torch.Tensor = type(module).forward(module, input)
        return found
    module._check_input_dim(input)
    mesh: DeviceMesh = module.__dict__[_MESH]
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    row = [1, -1, *[1] * (x.ndim - 2)]
    size = x.new_full((1,), x.numel() / x.shape[1])
    sums = copy_to(sum_from(torch.cat([x.sum(dims), size]), mesh), mesh)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(row)
    var = copy_to(sum_from(centred.square().sum(dims), mesh), mesh) / count
    _track(module, mean.detach(), var.detach() * count / (count - 1))
    output = centred * (var + module.eps).rsqrt().view(row)
    if module.weight is not None:
        output = output * module.weight.to(x.dtype).view(row)
    if module.bias is not None:
        output = output + module.bias.to(x.dtype).view(row)
    return output.to(input.dtype)


@torch.no_grad()
def _track(module: Any, mean: torch.Tensor, var: torch.Tensor) -> None:
    """Bring the running statistics up to date; the variance is that of a sample."""
    if not (module.training and module.track_running_stats and module.running_mean is not None):
        return
    module.num_batches_tracked.add_(1)
    share = module.momentum
    if share is None:  # the mean of all batches
        share = 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
    module.running_var.lerp_(var.to(module.running_var.dtype), share)
