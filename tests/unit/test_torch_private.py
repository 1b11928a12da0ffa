"""Every name that torch does not promise to keep is there, and does what plait relies on.

After an upgrade of torch this is the place that fails.
"""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from plait.errors import PlaitError
from plait.run import torch_private


def test_a_missing_name_is_an_error_that_says_it() -> None:
    with pytest.raises(PlaitError, match=r"has no torch\._C\._no_such_thing"):
        torch_private._named(torch, "_C._no_such_thing")


def test_a_backward_is_noticed() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_private.in_backward()))
    assert not torch_private.in_backward()
    (x * 2).sum().backward()
    assert seen == [True] and not torch_private.in_backward()


def test_the_holders_of_a_memory_are_counted() -> None:
    x = torch.ones(2)
    storage = x.untyped_storage()
    alone = torch_private.storage_holders(storage)
    view = x[:1]
    assert torch_private.storage_holders(storage) > alone
    del view
    assert torch_private.storage_holders(storage) == alone


def test_a_strided_shard_is_a_placement_of_its_own() -> None:
    placement = torch_private.StridedShard(1, split_factor=3)
    assert (placement.dim, placement.split_factor) == (1, 3)
    assert not isinstance(Replicate(), torch_private.StridedShard)
    assert not isinstance(Shard(1), torch_private.StridedShard)


@pytest.mark.ranks(2)
def test_operators_of_dtensors_can_be_taken_over() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    handlers = torch_private.dtensor_handlers()
    operator = torch.ops.aten.erfinv.default
    assert operator not in handlers
    handlers[operator] = lambda op, args, kwargs: torch.full((3,), 7.0)
    try:
        assert torch.erfinv(x).tolist() == [7.0, 7.0, 7.0]
    finally:
        del handlers[operator]


@pytest.mark.ranks(2)
def test_the_first_forward_of_fsdp_is_noticed() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert not torch_private.fsdp_has_run(model)
    model(torch.ones(1, 4))
    assert torch_private.fsdp_has_run(model)
    outer = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))
    assert not torch_private.fsdp_has_run(fully_shard(outer, mesh=mesh))


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    info = torch_private.stored_at("a", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("a", 3, 4)
    part = torch_private.slice_of(FileSystemReader(tmp_path), io.BytesIO(b"012345678"), info)
    assert part.read() == b"3456"
