"""`parallelize` of a model that has adapters already: split without them, then put them back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn

from plait.hf.peft.intercept import note_inside, refuse_config
from plait.hf.peft.on_parts import in_chunks
from plait.hf.peft.saved_modules import copyable
from plait.surgery import adopt
from plait.surgery.wrappers import Wrapped, look


def split_with_adapters(module: nn.Module, split: Callable[[nn.Module], Any]) -> bool:
    """Split a module that adapters of PEFT were put into, or a model of PEFT around one.

    Args:
        module: The module.
        split: Splits a module without adapters.

    Returns:
        Whether there are adapters. If not, nothing has been done.

    Raises:
        PlanError: There is an adapter of a kind that works on whole layers only. Nothing has been
            changed.

    Comm: that of `split` and of [`adopt`][plait.surgery.adopting.adopt].
    """
    around: Any = module
    inner: nn.Module = around.get_base_model() if hasattr(around, "get_base_model") else module
    wrapped = look(inner)
    if not wrapped.parts and inner is module:
        return False
    for config in getattr(inner, "peft_config", getattr(module, "peft_config", {})).values():
        refuse_config(config, inner)
    if wrapped.parts:
        from plait.hf.peft.layers import check_kinds

        check_kinds({name: part for name, (part, _) in wrapped.parts.items()})
    with _taken_out(inner, wrapped):
        split(inner)
    in_chunks(inner)
    with copyable(inner):
        for part, _ in wrapped.parts.values():
            _copy_anew(part)
    adopt(inner)
    if inner is not module:
        note_inside(module)
    return True


@contextmanager
def _taken_out(root: nn.Module, wrapped: Wrapped) -> Iterator[None]:
    """Inside, every wrapped layer is in the place of what wraps it."""
    saved: list[tuple[nn.Module, str, nn.Module]] = []
    for name, (part, wrapper) in wrapped.parts.items():
        owner, _, leaf = name.rpartition(".")
        if owner in wrapped.parts:
            continue  # inside of another one, which is taken out with it
        layer: nn.Module = part
        while (attribute := wrapper.inner(layer)) is not None:
            layer = getattr(layer, attribute)
        parent = root.get_submodule(owner)
        saved.append((parent, leaf, part))
        parent._modules[leaf] = layer
    try:
        yield
    finally:
        for parent, leaf, part in saved:
            parent._modules[leaf] = part


def _copy_anew(part: Any) -> None:
    """Let the trained copies of a module be copies of what it is now, with the values they had."""
    copies = getattr(part, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return
    for adapter, before in list(copies.items()):
        after = deepcopy(part.original_module)
        after.load_state_dict(before.state_dict())
        for (_, new), (_, old) in zip(
            after.named_parameters(), before.named_parameters(), strict=True
        ):
            new.requires_grad_(old.requires_grad)
        copies[adapter] = after
