"""Fused projections of an attention: q, k and v, or k and v, in one weight."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.plan.roles import FUSED
from plait.styles.linear import ColwiseParallel
from plait.styles.linear_kinds import validate_dims
from plait.styles.registry import ALL_PARALLEL_STYLES


class HeadsColwiseParallel(ColwiseParallel):
    """A colwise layer of several projections in one weight; each rank has those of its heads.

    The name under which it is registered says how the projections lie in the output features:

    | name | output features |
    |---|---|
    | `colwise_qkv` | all query heads, all key heads, all value heads |
    | `colwise_qkv_per_head` | of each head: query, key, value |
    | `colwise_qkv_per_group` | of each key/value head: its query heads, the key, the value |
    | `colwise_kv` | all key heads, all value heads |
    | `colwise_kv_per_head` | of each key/value head: key, value |

    Comm:
        As `colwise`.
    """

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Refuse a parameter without a dim of output features."""
        validate_dims(module, param, parameter_name, "colwise_qkv")


for _name in FUSED:
    ALL_PARALLEL_STYLES.register(_name, HeadsColwiseParallel())
