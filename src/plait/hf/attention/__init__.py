"""transformers' attention by plait: masks as descriptions, sequences that ranks share."""

from plait.hf.attention.entering import entered, refuse_unshareable
from plait.hf.attention.registering import NAME, register

__all__ = ["NAME", "entered", "refuse_unshareable", "register"]
