"""What a training script asks about its processes, and what it lets only some of them do."""

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.layout import ParallelismConfig
from plait.train import gathering
from plait.train.places import Places


class Processes:
    """The part of `Accelerator` that knows the processes, and talks to them.

    Attributes:
        places: This process's place in the layout.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._triggered = False

    @property
    def parallelism_config(self) -> ParallelismConfig:
        """The sizes, as they were resolved."""
        return self.places.config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of all axes, e.g. `torch_device_mesh["tp"]`; None in one process."""
        axes = self.places.sequences
        return self.places.mesh if axes is None else axes.mesh

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.places.device

    @property
    def num_processes(self) -> int:
        """All processes, those of a tensor-parallel group each."""
        return self.places.world.world_size

    @property
    def process_index(self) -> int:
        """This process among all."""
        return self.places.world.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its host."""
        return self.places.world.local_rank

    @property
    def num_data_ranks(self) -> int:
        """How many of the processes see samples of their own: `num_processes` ÷ tp_size."""
        return self.places.num_data_ranks

    @property
    def data_parallel_rank(self) -> int:
        """This process among those that see other samples."""
        return self.places.data_rank

    @property
    def tensor_parallel_rank(self) -> int:
        """This process among those that see the same samples."""
        return 0 if self.places.tp_mesh is None else self.places.tp_mesh.get_local_rank()

    @property
    def distributed_type(self) -> str:
        """The word that accelerate has for it: "NO", "MULTI_CPU" or "MULTI_GPU"."""
        if not self.use_distributed:
            return "NO"
        return "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self.process_index == self.num_processes - 1

    def print(self, *values: Any, **options: Any) -> None:
        """As the builtin, on the first process only."""
        if self.is_main_process:
            builtins.print(*values, **options)  # noqa: T201 - this is what it is for

    def wait_for_everyone(self) -> None:
        """Return when all processes have come here.

        Comm: one control message on each axis.
        """
        self.places.exchange("wait_for_everyone")

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """In this block the first process goes ahead, and the others follow when it is through.

        Comm: one control message on each axis.
        """
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """In this block the first process of each host goes ahead.

        Comm: one control message on each axis.
        """
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, ahead: bool) -> Iterator[None]:
        if not ahead:
            self.wait_for_everyone()
        try:
            yield
        except BaseException as error:
            comm.announce_failure(None, error)
            raise
        if ahead:
            self.wait_for_everyone()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: runs on the first process only; elsewhere it gives None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: runs on the first process of each host only."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: runs on the last process only."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int = 0
    ) -> Callable[..., Any]:
        """Decorator: runs on one process only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def _only(self, function: Callable[..., Any], here: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options) if here() else None

        return called

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This data rank's part of a list, a tensor, or a dict of them.

        Args:
            inputs: The same on all ranks.
            apply_padding: Repeat the last item so that all parts are as long.
        """
        places = self.places
        yield gathering.own_part(inputs, places.data_rank, places.num_data_ranks, apply_padding)

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all data ranks, one after another along dim 0; without gradients.

        Each tensor-parallel group counts once: its ranks hold the same. A number becomes one row.

        Comm: one all-gather for each tensor.
        """
        return gathering.gather(tensor, self.places.data_mesh)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors summed ("sum") or averaged ("mean") over the data ranks.

        Comm: one all-reduce for each tensor.
        """
        return gathering.reduce(tensor, self.places.data_mesh, reduction, scale)

    def gather_object(self, obj: Any) -> list[Any]:
        """Objects that can be pickled, of all data ranks; lists are joined.

        Comm: one control message.
        """
        mesh = self.places.data_mesh
        return gathering.first_of_columns([obj] if mesh is None else comm.exchange(obj, mesh))

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Nested tensors filled up along `dim` to the longest of all data ranks.

        Comm: one control message for each tensor.
        """
        return gathering.pad_across(tensor, self.places.data_mesh, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that all processes see in `check_trigger`."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process raised the flag; lowers it.

        Comm: one control message on each axis.
        """
        raised = any(self.places.exchange(self._triggered))
        if raised:
            self._triggered = False
        return raised
