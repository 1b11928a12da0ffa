"""What plait uses of torch that torch does not promise to keep: each name once, here.

A name that the installed torch does not have is an error that says so, at the import of this module
or at the call; nothing is guessed in its place. `tests/unit/test_torch_private.py` checks for each
that it does what plait relies on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from plait.errors import PlaitError

_ABSENT = object()


def _named(where: Any, path: str) -> Any:
    """An attribute of torch by its dotted path.

    Raises:
        PlaitError: There is none.
    """
    found = where
    for name in path.split("."):
        found = getattr(found, name, _ABSENT)
        if found is _ABSENT:
            owner = getattr(where, "__name__", type(where).__name__)
            raise PlaitError(
                f"torch {torch.__version__} has no {owner}.{path}:",
                "plait relies on it, and torch does not promise to keep it",
                "use a version of torch that plait names in its requirements",
            )
    return found


StridedShard = _StridedShard
"""The placement of a dim that is cut in parts before it is cut in shards."""

_graph_task_id: Callable[[], int] = _named(torch, "_C._current_graph_task_id")
_use_count: Callable[[int], int] = _named(torch, "_C._storage_Use_Count")


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return _graph_task_id() != -1


def backward_id() -> int:
    """A number of the backward that runs in this thread; -1: none."""
    return _graph_task_id()


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors hold a memory."""
    return _use_count(storage._cdata)


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Operators → what DTensors do for them in place of torch's own way; may be added to."""
    handlers: dict[Any, Callable[..., Any]] = _named(DTensor, "_op_dispatcher._custom_op_handlers")
    return handlers


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], like: torch.Tensor
) -> DTensor:
    """A DTensor around a tensor of a class that does not know `DTensor.from_local`'s operators.

    Args:
        local: This rank's part.
        mesh: The mesh.
        placements: How the whole lies on it.
        like: The whole: its shape, strides and dtype.
    """
    from torch.distributed.tensor import _dtensor_spec

    meta = _named(_dtensor_spec, "TensorMeta")(like.shape, like.stride(), like.dtype)
    spec = _named(_dtensor_spec, "DTensorSpec")(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def fsdp_has_run(root: nn.Module) -> bool:
    """Whether FSDP has noted the dtype of a sharded module's parameters, at its first forward."""
    group = _named(_named(root, "_get_fsdp_state")(), "_fsdp_param_group")
    # A module none of whose parameters are in its own group has no group, and notes nothing.
    return group is not None and bool(_named(group, "_reset_sharded_params"))


def fsdp_reduces(part: nn.Module) -> bool:
    """Whether the next backward of a module that FSDP shards reduces its gradients."""
    groups = _named(_named(part, "_get_fsdp_state")(), "_fsdp_param_groups")
    return all(_named(group, "reduce_grads") for group in groups)


def drop_unreduced(part: nn.Module) -> None:
    """Forget the gradients that FSDP keeps of one module until they are reduced."""
    for group in _named(_named(part, "_get_fsdp_state")(), "_fsdp_param_groups"):
        for param in _named(group, "fsdp_params"):
            param.unsharded_accumulated_grad = None
            gathered = getattr(param, "_unsharded_param", None)  # there after the first forward
            if gathered is not None:
                gathered.grad = None


class Unreduced:
    """A trained parameter of a group of FSDP in a backward, before its gradient is reduced."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return torch.device(_named(self._held, "sharded_param").device)

    @property
    def has_gradient(self) -> bool:
        """Whether this rank has a gradient of it, of this pass or of earlier ones."""
        gathered = getattr(self._held, "_unsharded_param", None)
        kept = _named(self._held, "unsharded_accumulated_grad")
        return kept is not None or (gathered is not None and gathered.grad is not None)

    def add_zeros(self) -> None:
        """Give it a gradient of zeros."""
        gathered = _named(self._held, "_unsharded_param")
        gathered.grad = torch.zeros_like(gathered)


def before_reducing(part: nn.Module, call: Callable[[list[Unreduced]], None]) -> None:
    """Call something before FSDP reduces the gradients of a module's group, at each backward.

    Args:
        part: A module that FSDP shards.
        call: Given the group's trained parameters. Those without a gradient are left out of what
            is reduced, so all ranks must have gradients of the same ones.
    """
    for group in _named(_named(part, "_get_fsdp_state")(), "_fsdp_param_groups"):
        reduce = _named(group, "post_backward")

        def post_backward(*unused: Any, group: Any = group, reduce: Any = reduce) -> Any:
            if _named(group, "reduce_grads"):
                held = _named(group, "fsdp_params")
                call([Unreduced(p) for p in held if p.sharded_param.requires_grad])
                if any(p.unsharded_accumulated_grad is not None for p in held):
                    for p in held:  # all in the dtype that gradients are added up in
                        if hasattr(p, "_unsharded_param"):
                            p.accumulate_unsharded_grad_if_needed()
                            p.to_accumulated_grad_if_needed()
            return reduce(*unused)

        group.post_backward = post_backward


def forget_failed_backward(root: nn.Module) -> bool:
    """Let FSDP begin anew after a backward that ended with an exception.

    Args:
        root: A module that FSDP shards, with others inside; called before a forward.

    Returns:
        Whether there was one. Gradients that were not reduced yet are gone then.
    """
    context = _named(_named(root, "_get_fsdp_state")(), "_state_ctx")
    if in_backward() or not _named(context, "post_backward_final_callback_queued"):
        return False
    _named(root, "reset_iter_state")()
    return True


def found_infinite(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """What a gradient scaler has found in an optimizer's gradients since its last update.

    Numbers by device, 0 where all were finite. Fused optimizers are handed them in their step.
    """
    found = _named(scaler, "_per_optimizer_states")[id(optimizer)]["found_inf_per_device"]
    return list(found.values())


def stored_at(file: str, offset: int, nbytes: int) -> Any:
    """Where torch's checkpoint reader finds a tensor."""
    from torch.distributed.checkpoint import filesystem

    return _named(filesystem, "_StorageInfo")(file, offset, nbytes)


def slice_of(reader: Any, file: Any, info: Any) -> Any:
    """The part of an open file of a checkpoint in which one tensor is."""
    return _named(reader, "_slice_file")(file, info)
