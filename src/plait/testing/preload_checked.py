"""Imported by the fork server after `preload`, when annotations are checked: plait's own rooms.

Compiling the checks costs about a second; done here it is paid once and not by every rank.
"""

import contextlib
import gc
import importlib
import pkgutil

from plait.testing import typecheck

if typecheck.install():
    for _room in typecheck.CHECKED:
        if _room == "testing":  # imported by what uses it; its plugin belongs to pytest's process
            continue
        with contextlib.suppress(Exception):  # whoever needs it gets the error, with its traceback
            _package = importlib.import_module(f"plait.{_room}")
            for _module in pkgutil.walk_packages(
                getattr(_package, "__path__", ()), f"plait.{_room}."
            ):
                importlib.import_module(_module.name)

gc.collect()
gc.freeze()
