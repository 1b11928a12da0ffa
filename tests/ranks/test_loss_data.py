"""Losses over data ranks with different numbers of samples: those of one process."""

import copy
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.errors import PlaitError
from plait.layout import DistributedConfig
from plait.loss import asking, last_count
from plait.loss.labels import Record
from plait.testing import mutation
from plait.train import accumulation, loader

CLASSES = 5
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A block and a head, with a loss of its labels; outputs are `[batch, 4, 5]`."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(
        self, x: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> Any:
        for layer in self.layers:
            x = x + layer(x).tanh()
        y = self.head(x)
        if labels is None:
            return y
        loss = self.loss(y, labels)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class Headed(nn.Module):
    """A head that is split, and stays so in a call with labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up, self.lm_head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.lm_head(self.up(x).tanh()), labels)


class Targets(Net):
    """The same, whose labels go by another name."""

    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, target)


class Ends(Net):
    """The start and the end of an answer."""

    def forward(self, x: Tensor, start_positions: Tensor, end_positions: Tensor) -> Any:  # type: ignore[override]
        start, end = super().forward(x)[..., :2].unbind(-1)
        return (F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)) / 2


def pair(loss: Loss, kind: type[Net] = Net, **sizes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    whole = kind(loss).double()
    split = copy.deepcopy(whole)
    plait.parallelize(
        split, DistributedConfig(**(sizes or {"dp_shard_size": dist.get_world_size()}))
    )
    return split, whole


def same(split: nn.Module, whole: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Loss and every gradient."""
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-11, atol=0)
    grads = plait.full_grads(split)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-8, atol=1e-11)


def classes(generator: torch.Generator, size: int) -> Tensor:
    labels = torch.randint(0, CLASSES, (size, 4), generator=generator)
    labels[:, size:] = -100  # rank by rank another share of tokens counts
    return labels


def numbers(generator: torch.Generator, size: int) -> Tensor:
    return torch.rand((size, 4, CLASSES), generator=generator, dtype=torch.float64)


def flat(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return y.reshape(-1, CLASSES), labels.reshape(-1)


WEIGHT = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)


def chosen(y: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error where a label counts."""
    scaled = (labels.float() * 2 - 1).to(y.dtype)
    return F.mse_loss(y[..., 0][labels != -100], scaled[labels != -100])


def ctc(y: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    lengths = (labels > 0).cumprod(-1).sum(-1)
    return F.ctc_loss(
        y.log_softmax(-1).transpose(0, 1), labels.clamp(min=1), torch.full_like(lengths, 4),
        lengths, reduction=reduction, zero_infinity=True,
    )  # fmt: skip


LOSSES: dict[str, tuple[Callable[..., Tensor], Loss]] = {
    "cross entropy": (classes, lambda y, t: F.cross_entropy(*flat(y, t))),
    "weights": (classes, lambda y, t: F.cross_entropy(*flat(y, t), weight=WEIGHT)),
    "nll": (classes, lambda y, t: F.nll_loss(flat(y.log_softmax(-1), t)[0], t.view(-1))),
    "nll weights": (
        classes,
        lambda y, t: F.nll_loss(y.log_softmax(-1).flatten(0, 1), t.view(-1), weight=WEIGHT),
    ),
    "weights sum": (
        classes,
        lambda y, t: F.cross_entropy(*flat(y, t), weight=WEIGHT, reduction="sum"),
    ),
    "sum by count": (
        classes,
        lambda y, t: F.cross_entropy(*flat(y, t), reduction="sum") / (t != -100).sum(),
    ),
    "probabilities": (
        numbers,
        lambda y, t: F.cross_entropy(y.flatten(0, 1), t.softmax(-1).flatten(0, 1)),
    ),
    "mse": (numbers, lambda y, t: F.mse_loss(y.squeeze(), t.squeeze())),
    "mse of some": (classes, chosen),
    "mse sum": (numbers, lambda y, t: nn.MSELoss(reduction="sum")(y, t)),
    "mse weights": (numbers, lambda y, t: F.mse_loss(y, t, weight=t.detach() + 1)),
    "l1": (numbers, F.l1_loss),
    "huber": (numbers, lambda y, t: F.huber_loss(y, t, delta=0.3)),
    "old reduction": (numbers, lambda y, t: F.smooth_l1_loss(y, t, size_average=True)),
    "bce": (numbers, lambda y, t: F.binary_cross_entropy(y.sigmoid(), t, weight=WEIGHT)),
    "bce logits": (numbers, lambda y, t: nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(y, t.round())),
    "kl": (numbers, lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1))),
    "kl batchmean": (
        numbers,
        lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    ),
    "margin": (classes, lambda y, t: F.multi_margin_loss(*flat(y, t.clamp(min=0)))),
    "ctc": (classes, ctc),
    "ctc sum": (classes, lambda y, t: ctc(y, t, "sum")),
}


def unequal(name: str) -> tuple[Any, Any]:
    """One step on 1, 2, … samples of the data ranks, and on all of them in one process."""
    make, loss = LOSSES[name]
    split, whole = pair(loss)
    generator = torch.Generator().manual_seed(1)
    parts = [
        (
            torch.randn((n + 1, 4, 8), generator=generator, dtype=torch.float64),
            make(generator, n + 1),
        )
        for n in range(dist.get_world_size())
    ]
    found = split(*parts[dist.get_rank()])
    expected = whole(*map(torch.cat, zip(*parts, strict=True)))
    found.backward()
    expected.backward()
    same(split, whole, found, expected)
    assert last_count(split) and last_count(split) == found.__dict__["_plait_tokens"]
    return split, whole


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.filterwarnings("ignore:size_average")
def test_losses_of_torch() -> None:
    for name in LOSSES:
        try:
            unequal(name)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.ranks(4)
def test_a_split_head() -> None:
    for name in ("mse", "bce logits", "kl batchmean", "weights", "nll weights", "ctc"):
        make, loss = LOSSES[name]
        torch.manual_seed(0)
        whole = Headed(loss).double()
        split = copy.deepcopy(whole)
        config = DistributedConfig(dp_shard_size=2, tp_size=2)
        plait.parallelize(split, config, tp_plan={"lm_head": "colwise_gather_output"})
        generator = torch.Generator().manual_seed(1)
        parts = [
            (torch.randn((n, 4, 8), generator=generator).double(), make(generator, n))
            for n in (1, 3)
        ]
        data = plait.state.state_of(split).data_mesh
        found = split(*parts[data.get_local_rank()])
        expected = whole(*map(torch.cat, zip(*parts, strict=True)))
        found.backward()
        expected.backward()
        same(split, whole, found, expected)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The loss of Net")
@pytest.mark.parametrize("name", ["nll weights", "mse", "mse of some", "ctc", "kl batchmean"])
def test_the_comparison_notices(name: str) -> None:
    with mutation.must_fail(asking, "Record", lambda *_, **__: Record()):
        unequal(name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["regression", "single_label", "multi_label", "answers"])
def test_heads_of_transformers(kind: str) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=6,
        intermediate_size=24, max_position_embeddings=32,
        num_labels={"regression": 1, "answers": 2}.get(kind, 3),
        problem_type=kind if kind == "regression" else f"{kind}_classification",
    )  # fmt: skip
    name = "QuestionAnswering" if kind == "answers" else "SequenceClassification"
    torch.manual_seed(0)
    whole = getattr(transformers, f"BertFor{name}")(config).double().eval()
    split = plait.parallelize(copy.deepcopy(whole), DistributedConfig(dp_shard_size=2))
    rank, ids = dist.get_rank(), torch.randint(3, 90, (4, 7))
    given = {
        "regression": {"labels": torch.rand(4, dtype=torch.float64)},
        "single_label": {"labels": torch.tensor([0, 2, 1, 1])},
        "multi_label": {"labels": torch.rand((4, 3), dtype=torch.float64).round()},
        "answers": {
            "start_positions": torch.tensor([1, 9, 2, 0]),  # 9 is none of the 7 places
            "end_positions": torch.tensor([3, 4, 6, 9]),
        },
    }[kind]
    mine = slice(0, 1) if rank == 0 else slice(1, 4)
    found = split(input_ids=ids[mine], **{k: v[mine] for k, v in given.items()}).loss
    expected = whole(input_ids=ids, **given).loss
    found.backward()
    expected.backward()
    same(split, whole, found, expected)


def own_mean(y: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(*flat(y, labels), reduction="none")
    return losses.sum() / (labels != -100).sum()


BATCHES: dict[str, tuple[Any, Any]] = {
    "targets": (Targets, lambda x, t: {"x": x, "target": t}),
    "tuples": (Net, lambda x, t: (x, t)),
    "labels": (Net, lambda x, t: {"x": x, "labels": t}),
    "numbers": (Net, lambda x, t: {"x": x, "labels": t.double()[..., None].expand(4, CLASSES)}),
    "answers": (
        Ends,
        lambda x, t: {"x": x, "start_positions": t[0] % 4, "end_positions": t[1] % 4},
    ),
    "own mean": (Net, lambda x, t: {"x": x, "labels": t}),
    "outside": (Net, lambda x, t: [x, t]),
}


def last_step(kind: str, samples: int, steps: int) -> None:
    """An epoch whose last step leaves ranks without a sample: loss and gradients."""
    model_class, make = BATCHES[kind]
    loss: Loss = F.mse_loss if kind == "numbers" else lambda y, t: F.cross_entropy(*flat(y, t))
    loss = own_mean if kind == "own mean" else loss
    generator = torch.Generator().manual_seed(2)
    data = [
        make(torch.randn((4, 8), generator=generator, dtype=torch.float64), labels)
        for labels in torch.randint(0, CLASSES, (samples, 4), generator=generator)
    ]
    torch.manual_seed(0)
    whole = model_class(loss).double()
    accelerator = plait.Accelerator(
        DistributedConfig(dp_shard_size=dist.get_world_size()), gradient_accumulation_steps=steps
    )
    split = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    split, optimizer, batches = accelerator.prepare(split, optimizer, DataLoader(data, 1))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        if kind == "outside":
            return loss(model(batch[0]), batch[1])
        return model(**batch) if isinstance(batch, dict) else model(*batch)

    for batch in batches:
        with accelerator.accumulate(split):
            accelerator.backward(loss_of(split, batch))
    expected = loss_of(whole, next(iter(DataLoader(data, samples))))
    expected.backward()
    same(split, whole, accelerator.window_loss(), expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:The loss of Net")
@pytest.mark.parametrize("kind", BATCHES)
def test_ranks_without_a_sample(kind: str) -> None:
    ranks = dist.get_world_size()
    last_step(kind, 1, steps=1)
    last_step(kind, ranks + 1, steps=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["targets", "tuples", "numbers", "answers"])
def test_the_comparison_notices_a_sample_twice(kind: str) -> None:
    with mutation.must_fail(loader.contents, "without_labels", lambda batch: batch):
        last_step(kind, 3, steps=2)
    with mutation.must_fail(accumulation.Window, "_weigh", lambda self, counted, turn: 0.5):
        last_step(kind, 3, steps=2)


@pytest.mark.ranks(2)
def test_a_loss_that_plait_does_not_know_is_told_once() -> None:
    split, whole = pair(own_mean)
    x, labels = torch.randn(2, 4, 8, dtype=torch.float64), torch.zeros((2, 4), dtype=torch.long)
    asking._WARNED.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            split(x, labels)
        whole(x, labels)
    told = [str(item.message) for item in seen if "The loss of Net" in str(item.message)]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("split_logits" in text for text in told)


@pytest.mark.ranks(2)
def test_the_number_of_items_is_that_of_all_ranks() -> None:
    split, whole = pair(lambda y, t: F.cross_entropy(*flat(y, t), reduction="sum"))
    generator, rank = torch.Generator().manual_seed(3), dist.get_rank()
    x = torch.randn((3, 4, 8), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (3, 4), generator=generator)
    mine = slice(0, 1) if rank == 0 else slice(1, 3)
    for number in (12, torch.tensor(12)):
        for model in (split, whole):
            model.zero_grad()
        found, expected = split(x[mine], labels[mine], number), whole(x, labels, number)
        found.backward()
        expected.backward()
        same(split, whole, found, expected)
    for number in (labels[mine].numel(), torch.tensor(1_000_000 + rank)):
        with pytest.raises(PlaitError, match="num_items_in_batch"):
            split(x[mine], labels[mine], number)
    with pytest.raises(PlaitError, match="num_items_in_batch"):
        split(x[mine], labels[mine], 12 if rank else None)


COMPILED = """
import copy, sys
import torch, plait
from plait.layout import DistributedConfig
from plait.testing import add_noise, tiny
from plait.train.batches import without_labels

sizes = eval(sys.argv[1])
graphs = []


def counting(graph, inputs):
    graphs.append(graph)
    return graph


for backend, how in ((counting, "model"), ("aot_eager", "model"), (counting, "layers")):
    torch._dynamo.reset()
    whole = add_noise(tiny.model("llama", vocab_size=97)).double()
    split = plait.parallelize(copy.deepcopy(whole), DistributedConfig(**sizes))
    batch = tiny.batch("llama", size=4, length=7)
    batch["labels"][:2, 3:] = -100
    data = plait.state.state_of(split).data_mesh
    rank = 0 if data is None else data.get_local_rank()
    part = slice(None) if data is None else (slice(0, 1), slice(1, 4))[rank]
    mine = {name: x[part] for name, x in batch.items()}
    called = split
    if how == "layers":
        for layer in split.model.layers:
            layer.compile(backend=backend)
    else:
        called = torch.compile(split, backend=backend)
    graphs.clear()
    for seed in range(2):
        split.zero_grad(), whole.zero_grad()
        loss, expected = called(**mine).loss, whole(**batch).loss
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        grads = plait.full_grads(split)
        for name, param in whole.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-6)
    assert graphs or how == "model", how
    if data is not None and how == "model":
        marked = without_labels(mine) if rank else mine  # a rank without a sample
        expected = whole(**{name: x[:1] for name, x in batch.items()}).loss
        torch.testing.assert_close(called(**marked).loss, expected, rtol=1e-6, atol=0)
        try:
            torch.compile(split, backend="eager", fullgraph=True)(**mine)
        except Exception as error:
            assert "compile the layers" in str(error), error
        else:
            raise AssertionError("a compiled loss of one rank")
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["{'dp_shard_size': 2}", "{'tp_size': 2}"])
def test_compiled(sizes: str, tmp_path: Path, warm_commands: Path) -> None:
    # In a program of its own, without the checks of annotations that torch.compile cannot trace.
    (tmp_path / "compiled.py").write_text(COMPILED)
    launcher = [str(warm_commands / "torchrun"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "compiled.py"), sizes],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.stdout.count("compiled") == 2, done.stderr
