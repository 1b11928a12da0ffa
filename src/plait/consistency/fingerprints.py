"""What a rank tells the others of a tensor or a call: a text and a checksum, never the values."""

import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Sketch = tuple[float, float]
"""The norm of a tensor and one projection of it: equal to rounding where the tensors are."""

Entry = tuple[str, str, Sketch | None]
"""What a tensor or value is, in words; a checksum of its content; a sketch, where one is asked."""

_CHUNK = 1 << 24  # elements that are weighted at a time on a device
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OTHERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def checksum(x: Tensor) -> str:
    """A checksum of a tensor's bits; equal tensors have equal ones on one kind of device.

    Args:
        x: Any shape, dtype, device. On a GPU only the sum leaves it.
    """
    flat = x.detach().contiguous().reshape(-1)
    if flat.numel() == 0 or flat.is_meta:
        return ""
    if flat.device.type == "cpu":
        # A copy: numpy would pin memory that FSDP frees after the forward.
        return f"{zlib.crc32(flat.view(torch.uint8).clone().numpy().data):08x}"
    return f"{weighted_bits(flat) & (1 << 64) - 1:016x}"


def weighted_bits(flat: Tensor) -> int:
    """The bits of a contiguous tensor, weighted by place and summed on its device, modulo 2⁶⁴."""
    bits = flat.view(torch.uint8)
    for width, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if bits.numel() % width == 0:
            bits = bits.view(dtype)
            break
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=flat.device)
        total += ((part ^ (part >> 29)) * (place * 0x9E3779B1 | 1)).sum()  # wraps around
    return int(total.item())


def sketch(x: Tensor) -> Sketch | None:
    """The norm and a projection of a floating tensor, in float64."""
    if not x.is_floating_point():
        return None
    flat = x.detach().reshape(-1).double()
    along = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).cos()
    return float(flat.norm()), float(flat @ along)


def of_tensor(x: Tensor | None, sketched: bool = False) -> Entry:
    """The entry of a tensor that every rank should hold alike; None is absent."""
    if x is None:
        return "absent", "", None
    x = x._local_tensor if isinstance(x, DTensor) else x
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return text, checksum(x), sketch(x) if sketched else None


def of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Entry]:
    """One entry for every argument of a forward, those inside of containers by themselves."""
    entries: dict[str, Entry] = {}
    for position, value in enumerate(args):
        _add(f"argument {position}", value, entries)
    for name in sorted(kwargs):
        _add(name, kwargs[name], entries)
    return entries


def modes(training: bool) -> dict[str, Entry]:
    """Settings of torch under which a forward takes another path, with other collectives."""
    gradients = "recorded" if torch.is_grad_enabled() else "not recorded"
    entries: dict[str, Entry] = {
        "train()": (str(training), "", None),
        "gradients": (gradients, "", None),
    }
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            entries[f"autocast {device}"] = (str(torch.get_autocast_dtype(device)), "", None)
    return entries


def _add(name: str, value: Any, entries: dict[str, Entry]) -> None:
    if isinstance(value, DTensor):
        entries[name] = (f"a DTensor {tuple(value.shape)} as {value.placements}", "", None)
    elif isinstance(value, Tensor):
        entries[name] = of_tensor(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(f"{name}.{key}", item, entries)
    elif isinstance(value, list | tuple):
        entries[name] = (f"a {type(value).__name__} of {len(value)}", "", None)
        for position, item in enumerate(value):
            _add(f"{name}[{position}]", item, entries)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        short = text if len(text) <= 60 else f"{text[:57]}..."
        entries[name] = (short, "" if short == text else f"{zlib.crc32(text.encode()):08x}", None)
    elif hasattr(value, "get_seq_length"):  # a cache; each rank's has its own heads
        entries[name] = (f"a {type(value).__name__} of {int(value.get_seq_length())}", "", None)
    else:
        entries[name] = (f"a {type(value).__qualname__}", "", None)


def place() -> str:
    """Where in the user's program this is: file and line of the innermost frame that is his."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, _STDLIB, "<")) and not any(p in file for p in _OTHERS):
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
