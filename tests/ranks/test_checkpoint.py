"""Training goes on from a checkpoint as if nothing had happened, at any other layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import plait
from plait.checkpoint import held, load, save
from plait.proof.numbers import exact
from plait.testing import add_noise, tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven heads": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    ),
    "fused": ("phi3", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "plain module": ("mlp", {}),
}
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "one process": ((), ()),
    "tp 2": (("tp",), (2,)),
    "tp 3": (("tp",), (3,)),
    "tp 4": (("tp",), (4,)),
    "dp_shard 2 × tp 2": (("dp_shard", "tp"), (2, 2)),
    "dp_shard 4": (("dp_shard", "tp"), (4, 1)),
    "dp_replicate 2 × dp_shard 2": (("dp_replicate", "dp_shard", "tp"), (2, 2, 1)),
}


class Run:
    """A training at one layout, on the ranks that take part in it."""

    def __init__(self, which: str, layout: str, **options: Any) -> None:
        self.name, overrides = MODELS[which]
        self.layout = layout
        names, sizes = LAYOUTS[layout]
        count = int(torch.tensor(sizes).prod()) if sizes else 1
        self.model: Any = add_noise(tiny.model(self.name, **overrides))
        self.mesh: DeviceMesh | None = None
        if names:  # every rank makes the mesh, its members use it
            ranks = torch.arange(count).reshape(sizes)
            self.mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        self.takes_part = dist.get_rank() < count
        if self.mesh is not None and self.takes_part:
            plan = tiny.MLP_PLAN if self.name == "mlp" else None
            plait.parallelize(self.model, tp_plan=plan, device_mesh=self.mesh, check=False)
        options = {"lr": 1e-2, "weight_decay": 0.1, **options}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=9)

    @property
    def num_data_ranks(self) -> int:
        names, sizes = LAYOUTS[self.layout]
        shares = [n for name, n in zip(names, sizes, strict=True) if name.startswith("dp")]
        return int(torch.tensor(shares).prod()) if shares else 1

    def step(self, number: int) -> float:
        """One step on its share of a batch of four rows; the loss of the whole batch."""
        batch = tiny.batch(self.name, size=4, length=5, seed=number)
        n = self.num_data_ranks
        if self.mesh is not None:
            at = 0
            for name, size, place in zip(
                self.mesh.mesh_dim_names or (),
                self.mesh.shape,
                self.mesh.get_coordinate() or (),
                strict=True,
            ):
                at = at * size + place if name.startswith("dp") else at
            batch = {key: x.chunk(n)[at] for key, x in batch.items()}
        with exact():
            out = self.model(**batch)
            loss = (out**2).mean() if self.name == "mlp" else out.loss
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self._mean(float(loss.detach()))

    def _mean(self, loss: float) -> float:
        if self.mesh is None:
            return loss
        losses = [0.0] * self.mesh.size()
        told = gathered(loss, self.mesh)
        assert len(told) == len(losses)
        return sum(told) / len(told)


def gathered(x: Any, mesh: DeviceMesh) -> list[Any]:
    from plait.weights.outcome import meet

    return meet(mesh, "test", x)


def local_states(run: Run) -> dict[str, torch.Tensor]:
    found = {name: held.local_of(p) for name, p in run.model.named_parameters()}
    for name, p in run.model.named_parameters():
        state = run.optimizer.state.get(p, {})
        found |= {f"{name} {k}": held.local_of(x) for k, x in state.items()}
    return {name: x.clone() for name, x in found.items()}


def trained(which: str, layout: str, directory: Path | None = None) -> list[float]:
    """Three steps, and a checkpoint after them."""
    run = Run(which, layout)
    losses = [run.step(i) for i in range(3)] if run.takes_part else []
    if run.takes_part and directory is not None:
        save(directory, run.model, run.optimizer, run.scheduler, step=3, extra={"seen": 12})
    dist.barrier()
    return losses


@pytest.fixture
def unbroken() -> dict[str, list[float]]:
    return {}


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize(
    "which",
    [pytest.param(x, marks=pytest.mark.wide) if x == "fused" else x for x in MODELS],
)
@pytest.mark.parametrize(
    ("before", "afterwards"),
    [
        ("tp 2", ("one process", "tp 3", "tp 4", "dp_shard 2 × tp 2")),
        ("dp_shard 2 × tp 2", ("tp 3", "dp_shard 4", "one process")),
        ("dp_replicate 2 × dp_shard 2", ("tp 2", "dp_shard 2 × tp 2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_resumes_at_another_layout(
    which: str, before: str, afterwards: tuple[str, ...], tmp_path: Path
) -> None:
    oracle = Run(which, "one process")
    expected = [oracle.step(i) for i in range(6)]
    losses = trained(which, before, tmp_path)
    assert not losses or losses == pytest.approx(expected[:3], rel=1e-11)
    for layout in afterwards:
        run = Run(which, layout)
        if run.takes_part:
            for _ in range(2):  # into a state that is different already
                run.step(17)
            found = load(tmp_path, run.model, run.optimizer, run.scheduler)
            assert (found.step, found.extra) == (3, {"seen": 12})
            assert [run.step(i) for i in range(3, 6)] == pytest.approx(expected[3:], rel=1e-11)
        dist.barrier()
