"""`transformers.Trainer` with a split model.

`intercept` is called when a Trainer is made, and lets those of split models, and the accelerators
that they make, be of classes that know it: `training` and `accelerating`. `dealing` says which
samples each data rank gets, `states` makes optimizer states whole and takes them apart, `checks`
refuses what a split model cannot do. Nothing changes for other models of the process.
"""

from plait.hf.trainer.intercept import expect_trainer

__all__ = ["expect_trainer"]
