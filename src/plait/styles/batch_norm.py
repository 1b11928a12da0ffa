"""Batch normalisation over the samples of all data ranks."""

import inspect
import weakref
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from plait.comm import copy_to, sum_from
from plait.loss.asking import ALONE
from plait.styles.layer import rebind

_MESH, _ROOT = "_plait_batch_mesh", "_plait_batch_root"
_OWN = "_plait_batch_forward"  # a forward that was set on the instance, or None: the class's


def normalise_over_data(root: nn.Module, mesh: DeviceMesh | None) -> None:
    """Let batch normalisations in training take the statistics of all data ranks' samples.

    Means, variances and running statistics are those of one process over the global batch, on all
    ranks alike. Inside of `plait.gathered` each rank takes its own samples'.

    Args:
        root: A model whose data ranks see different samples.
        mesh: The data ranks.

    Comm: in training two all-reduces of a number for each channel forward, and two backward.
    """
    if mesh is None or mesh.size() == 1:
        return
    for part in root.modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
            part.__dict__[_MESH], part.__dict__[_ROOT] = mesh, weakref.ref(root)
            border = part.__dict__.get("_plait_border")
            if border is None:
                part.__dict__[_OWN] = part.__dict__.get("forward")
                rebind(part, _forward)
            else:
                part.__dict__[_OWN] = border.forward
                border.forward = MethodType(_forward, part)


def _forward(module: Any, input: torch.Tensor) -> torch.Tensor:
    """As `torch.nn.BatchNorm1d.forward`, over all ranks.

    Args:
        module: The normalisation.
        input: `[samples, channels, …]`, this rank's samples.

    Source: Ioffe, Szegedy, Batch Normalization (arXiv 1502.03167), algorithm 1.
    """
    root = module.__dict__[_ROOT]()
    before = module.__dict__[_OWN]
    own = before if before is not None else MethodType(type(module).forward, module)
    alone = root is not None and root.__dict__.get(ALONE)
    if alone or not (module.training or module.running_mean is None):
        found: torch.Tensor = own(input)
        return found
    mesh: DeviceMesh = module.__dict__[_MESH]
    if before is not None or type(module).forward is not _BatchNorm.forward:
        with _OverAllRanks(mesh):  # a forward that does more
            found = own(input)
        return found
    module._check_input_dim(input)
    share = module.momentum
    tracks = module.training and module.track_running_stats and module.running_mean is not None
    if tracks:
        module.num_batches_tracked.add_(1)
        if share is None:  # the mean of all batches
            share = 1.0 / float(module.num_batches_tracked)
    running = (module.running_mean, module.running_var) if tracks else (None, None)
    return _normalised(mesh, input, running, module.weight, module.bias, share, module.eps)


class _OverAllRanks(TorchFunctionMode):
    """Inside, `torch.nn.functional.batch_norm` in training is over the data ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        asked = given.arguments
        if not asked["training"]:
            return func(*args, **(kwargs or {}))
        running = asked["running_mean"], asked["running_var"]
        return _normalised(
            self.mesh,
            asked["input"],
            running,
            asked["weight"],
            asked["bias"],
            asked["momentum"],
            asked["eps"],
        )


def _normalised(
    mesh: DeviceMesh,
    input: torch.Tensor,
    running: tuple[Any, Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    share: float,
    eps: float,
) -> torch.Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    row = [1, -1, *[1] * (x.ndim - 2)]
    size = x.new_full((1,), x.numel() / x.shape[1])
    sums = copy_to(sum_from(torch.cat([x.sum(dims), size]), mesh), mesh)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(row)
    var = copy_to(sum_from(centred.square().sum(dims), mesh), mesh) / count
    _track(running, mean.detach(), var.detach() * count / (count - 1), share)
    output = centred * (var + eps).rsqrt().view(row)
    if weight is not None:
        output = output * weight.to(x.dtype).view(row)
    if bias is not None:
        output = output + bias.to(x.dtype).view(row)
    return output.to(input.dtype)


@torch.no_grad()
def _track(running: tuple[Any, Any], mean: torch.Tensor, var: torch.Tensor, share: float) -> None:
    """Bring the running statistics up to date; the variance is that of a sample."""
    for kept, now in zip(running, (mean, var), strict=True):
        if kept is not None:
            kept.lerp_(now.to(kept.dtype), share)
