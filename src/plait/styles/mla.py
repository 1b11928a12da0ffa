"""Multi-head latent attention: the projection that makes the latent and the shared rotary key.

`kv_a_proj_with_mqa` gives `[latent | rotary key]`, whole on every rank. The latent goes through
`kv_b_proj`, whose border sums its gradient over the ranks. The rotary key goes to the heads of each
rank directly, so its gradient on each rank is only a term, and is summed here.

Source: DeepSeek-AI, DeepSeek-V2 (arXiv 2405.04434), section 2.1, eqs. 9-19.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import copy_to
from plait.errors import PlanError
from plait.styles.layer import Args, Kwargs, TensorParallelLayer
from plait.styles.params import replicate
from plait.styles.registry import ALL_PARALLEL_STYLES

ROPE_DIM = "_plait_rope_dim"  # on the module: features of the rotary key


class MlaKvAProjParallel(TensorParallelLayer):
    """The projection to the latent and the rotary key; its parameters are whole on every rank.

    Comm:
        Backward one all-reduce of the gradient of the rotary key, `[batch, sequence, rope]`.
    """

    def validate(self, module: nn.Module, mesh: DeviceMesh, name: str) -> None:
        """Refuse a module that gives no rotary key of its own."""
        width = getattr(module, "out_features", None)
        if not isinstance(width, int):
            raise PlanError(
                f"Style 'mla_kv_a_proj' on {name!r}:",
                f"{type(module).__name__} is not a linear layer",
                "name the projection kv_a_proj_with_mqa",
            )

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Make the parameter a DTensor that every rank holds whole."""
        replicate(module, param, mesh)

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh
    ) -> tuple[Args, Kwargs]:
        """Nothing: the input is whole on every rank."""
        return args, kwargs

    def transform_output_post_forward(
        self, module: nn.Module, output: Any, mesh: DeviceMesh
    ) -> Any:
        """Sum the gradient of the rotary key over the ranks."""
        rope: int = module.__dict__[ROPE_DIM]
        latent, rotary = output.split([output.shape[-1] - rope, rope], dim=-1)
        return torch.cat([latent, copy_to(rotary, mesh)], dim=-1)


ALL_PARALLEL_STYLES.register("mla_kv_a_proj", MlaKvAProjParallel())
