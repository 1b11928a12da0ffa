"""Modules that stand around a split one and hand everything on to it, such as PEFT's models."""

from torch import nn

_AROUND = "_plait_around"


def stand_around(outer: nn.Module, name: str) -> None:
    """Note that `outer` holds a split module as its submodule `name`, and speaks for it."""
    outer.__dict__[_AROUND] = name


def place_of_split(module: nn.Module) -> str:
    """The name of the split module that `module` speaks for; `""`: of itself."""
    name: str = module.__dict__.get(_AROUND, "")
    return name


def split_module(module: nn.Module) -> nn.Module:
    """The split module that `module` speaks for: as a rule itself."""
    name = place_of_split(module)
    return split_module(module.get_submodule(name)) if name else module
