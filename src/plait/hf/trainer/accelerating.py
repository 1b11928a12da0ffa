"""The accelerator of a split model's Trainer: loaders and metrics go by data ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from plait import comm
from plait.hf.trainer.dealing import dealt, own_rows
from plait.state import ParallelState

_classes: dict[type, type] = {}


def take_over(accelerator: Any, state: ParallelState) -> None:
    """Let one accelerator, and no other, deal out samples over the data ranks of a split model."""
    kind = type(accelerator)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_SplitAccelerator, kind), {})
    accelerator.dataloader_config.dispatch_batches = False
    accelerator.__class__ = _classes[kind]
    accelerator._plait_state = state


class _SplitAccelerator:
    """In front of accelerate's class."""

    _plait_state: ParallelState
    _plait_is_idle = False  # the batch in hand has no sample of this rank's: sums are of none
    _plait_view: tuple[int, int] | None = None  # rank and number, while a loader is prepared

    @property
    def num_processes(self) -> int:
        """All of them, but for a loader."""
        return self._plait_view[1] if self._plait_view else super().num_processes  # type: ignore[misc]

    @property
    def process_index(self) -> int:
        """That of the run, but for a loader."""
        return self._plait_view[0] if self._plait_view else super().process_index  # type: ignore[misc]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, with this data rank's samples."""
        rank, count = data_place(self._plait_state)
        view = (rank, count)
        if isinstance(data_loader, DataLoader) and not isinstance(
            data_loader.dataset, IterableDataset
        ):
            if not getattr(data_loader, "_is_accelerate_prepared", False):
                data_loader = dealt(data_loader, rank, count)
            view = (0, 1)  # accelerate has nothing left to deal out
        with self._plait_viewed(view):
            return super().prepare_data_loader(data_loader, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _plait_viewed(self, view: tuple[int, int]) -> Iterator[None]:
        self._plait_view = view
        try:
            yield
        finally:
            self._plait_view = None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Every sample's rows once, in the order of one process.

        Comm: over the data ranks one all-gather for each tensor, or a control message.
        """
        mesh = self._plait_state.data_mesh
        rows = own_rows(self.gradient_state.active_dataloader)  # type: ignore[attr-defined]
        if not use_gather_object:
            try:
                own = input_data
                if self._plait_is_idle:
                    own = _mapped(own, lambda x: x if x.ndim else torch.zeros_like(x))
                return _mapped(own, lambda x: _gathered(x, mesh, rows))
            except TypeError:
                pass
        own = input_data if rows is None else input_data[:rows]
        found = [own] if mesh is None else comm.exchange(own, mesh)
        return [item for part in found for item in (part if isinstance(part, list) else [part])]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm over all ranks, as one process has it; a plain tensor."""
        from torch.distributed.tensor import DTensor

        self.unscale_gradients()  # type: ignore[attr-defined]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def data_place(state: ParallelState) -> tuple[int, int]:
    """This rank's place among those that see other samples, and their number."""
    mesh = state.data_mesh
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


def _gathered(x: torch.Tensor, mesh: Any, rows: int | None) -> torch.Tensor:
    x = x.detach()
    if x.ndim == 0:  # one number for each rank, whatever it has
        x = x.reshape(1)
    elif rows is not None:
        x = x[:rows]
    if mesh is None:
        return x
    wide = x.to(torch.uint8) if x.dtype is torch.bool else x
    return comm.all_gather(wide.contiguous(), mesh, dim=0).to(x.dtype)


def _mapped(data: Any, change: Any) -> Any:
    """Nested tensors, each changed.

    Raises:
        TypeError: Something in it is no tensor.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        return type(data)({key: _mapped(value, change) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(value, change) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(_mapped(value, change) for value in data)
    raise TypeError(f"{type(data).__name__} is no tensor")
