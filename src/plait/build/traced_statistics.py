"""Which statistics a norm takes over a width that the plan splits, without computing them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_MEANS = {torch.mean: 1, torch.Tensor.mean: 1}
_VARIANCES = {torch.var: 2, torch.Tensor.var: 2, torch.std: 2, torch.Tensor.std: 2}
_NORMS = {F.layer_norm: 2, F.rms_norm: 1}


class Statistics(TorchFunctionMode):
    """Notes each sum over a last dim of `width`, as the style `split_norm` takes it over the ranks.

    Args:
        width: Features of the whole dim.

    Attributes:
        found: Rows, bytes, and whether a gradient is recorded, of each sum.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.found: list[tuple[int, int, bool]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes means, variances and norms over the last dim."""
        kwargs = kwargs or {}
        times = _MEANS.get(func) or _VARIANCES.get(func) or _NORMS.get(func)
        x = args[0] if args else kwargs.get("input")
        if times and isinstance(x, Tensor) and self._concerns(x, args, kwargs):
            dtype = kwargs.get("dtype") if func in _MEANS else None
            dtype = dtype or x.dtype
            dtype = torch.float32 if dtype in _HALF else dtype
            rows = x.numel() // x.shape[-1]
            self.found += [(rows, rows * dtype.itemsize, x.requires_grad)] * times
        return func(*args, **kwargs)

    def _concerns(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if x.ndim == 0 or x.shape[-1] != self.width:
            return False
        dim = kwargs.get("normalized_shape", kwargs.get("dim", args[1] if len(args) > 1 else None))
        if isinstance(dim, torch.Size | tuple | list) and len(dim) == 1:
            dim = dim[0]
        return dim in (-1, x.ndim - 1, self.width)
