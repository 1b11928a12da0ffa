"""Training over shards, copies and tensor parallelism on CUDA devices over NCCL."""

import copy
from typing import Any

import pytest
import torch

from plait.testing import run_ranks

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}"),
]

LAYOUTS = {2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)], 4: [(1, 2, 2), (2, 2, 1)]}


def trained_on_devices(name: str, layout: tuple[int, int, int], options: dict[str, Any]) -> float:
    """Three steps split and whole; returns the largest difference of a weight."""
    import plait
    from plait.proof.numbers import exact
    from plait.run import process_group
    from plait.state import state_of
    from plait.testing import add_noise, tiny

    device = process_group.ensure("cuda")
    copies, shards, tp = layout
    whole = add_noise(tiny.model(name, dtype=torch.float64))
    split = copy.deepcopy(whole)
    if not options.get("fsdp_cpu_offload"):
        split.to(device)
    whole.to(device)
    config = plait.DistributedConfig(
        dp_replicate_size=copies, dp_shard_size=shards, tp_size=tp, **options
    )
    plait.parallelize(split, config)
    data = state_of(split).data_mesh
    number, rank = (1, 0) if data is None else (data.size(), data.get_local_rank())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (split, whole)]
    for step in range(3):
        batches = [tiny.batch(name, seed=10 * step + n) for n in range(number)]
        batches = [{key: x.to(device) for key, x in batch.items()} for batch in batches]
        with exact():
            split(**batches[rank]).loss.backward()
            (sum(whole(**batch).loss for batch in batches) / number).backward()
        for model, optimizer in zip((split, whole), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    state = plait.full_state_dict(split)
    return max(float((state[k] - v.cpu()).abs().max()) for k, v in whole.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"fsdp_cpu_offload": True}], ids=["device", "offload"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize(
    "layout", [one for n, some in LAYOUTS.items() if n <= NUM_GPUS for one in some]
)
def test_weights_after_three_steps(
    name: str, layout: tuple[int, int, int], options: dict[str, Any]
) -> None:
    number = layout[0] * layout[1] * layout[2]
    differences = run_ranks(
        trained_on_devices, number, name, layout, options, backend=None, timeout=300
    )
    assert max(differences) < 1e-9
