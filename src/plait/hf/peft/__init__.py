"""Adapters of PEFT on a split model.

PEFT puts a layer of its own around each layer that it adapts, and makes factors for the whole of
it. Here they are cut as the layer is: `styles` says how, `layers` makes its code work on the parts,
`intercept` is called when PEFT adds, merges or saves adapters of a model that is split.
"""

from plait.hf.peft.intercept import expect_peft
from plait.hf.peft.splitting import split_with_adapters

__all__ = ["expect_peft", "split_with_adapters"]
