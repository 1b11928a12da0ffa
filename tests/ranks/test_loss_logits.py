"""Split logits in anybody's code: the numbers and gradients of whole ones, whatever is done."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from plait.comm import count
from plait.errors import PlaitError
from plait.loss import SplitLogits, Vocabulary, pointwise
from plait.plan.intervals import even
from plait.testing import mutation

VOCAB = 7
LABELS = torch.tensor([[0, 6, 3, -100], [5, 2, -100, 1]])
PLACES = torch.tensor([[[0], [6], [3], [2]], [[5], [2], [4], [1]]])
BIAS = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)


class Double(torch.autograd.Function):
    """An autograd function of somebody's: it does not come through `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2


def loss(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.reshape(-1, VOCAB), LABELS.view(-1))


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        change(x)
        return loss(x)

    return changed


def item(x: torch.Tensor) -> None:
    x[..., 3] = 0.5


def tail(x: torch.Tensor) -> None:
    x[..., 2:].mul_(2)


def row(x: torch.Tensor) -> None:
    x[0, 1].fill_(0.25)


def flat(x: torch.Tensor) -> None:
    x.view(-1, VOCAB)[:, 1].zero_()


def masked(x: torch.Tensor) -> None:
    x.masked_fill_(x > 0.5, -1.0)


def scaled(x: torch.Tensor) -> None:
    x *= 3
    x.div_(2).add_(BIAS)
    x[..., 1] = -2.0
    x /= 2


LOCAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softcap": lambda x: loss(torch.tanh(x / 30.0) * 30.0),
    "scale": lambda x: loss((x.float() if x.dtype != torch.float64 else x).double() * 0.5),
    "reversed": lambda x: loss(2 - x) + loss(1 / (3 + x)),
    "bias": lambda x: loss(x + BIAS) + loss(BIAS.view(1, 1, -1) - x),
    "where": lambda x: loss(torch.where(BIAS > 0, x, x * 2)),
    "shift": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCAB), LABELS[..., 1:].reshape(-1)
    ),
    "rows": lambda x: F.cross_entropy(x[LABELS >= 0], LABELS[LABELS >= 0]),
    "some": lambda x: F.cross_entropy(x[0, 1:3], LABELS[0, 1:3]) + x[1].logsumexp(-1).sum(),
    "transpose": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "permute": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS, reduction="none").sum(),
    "one row": lambda x: F.cross_entropy(x[0, 0], LABELS[0, 0]),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.2),
    "chunks": lambda x: sum(
        (loss(torch.cat([c, c])) for c in x.chunk(2)), torch.tensor(0.0, dtype=x.dtype)
    ),
    "stack": lambda x: F.cross_entropy(
        torch.stack([x, x], 1).flatten(0, 2), LABELS[[0, 0, 1, 1]].flatten()
    ),
    "log_softmax": lambda x: x.log_softmax(-1).gather(-1, PLACES).sum(),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, VOCAB), LABELS.view(-1)),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "module": lambda x: torch.nn.CrossEntropyLoss(reduction="sum")(
        x.view(-1, VOCAB), LABELS.view(-1)
    ),
    "unsqueeze": lambda x: loss(
        x.unsqueeze(0).squeeze(0).select(0, 1)[None].expand_as(x[:1]).repeat(2, 1, 1)
    ),
    "scaled in place": in_place(scaled),
    "row in place": in_place(row),
    "mask in place": in_place(masked),
}
"""Losses that no whole is needed for (but for the last few)."""

WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weights": lambda x: F.cross_entropy(
        x.view(-1, VOCAB), LABELS.view(-1), weight=BIAS.abs() + 0.1
    ),
    "distribution": lambda x: F.cross_entropy(
        x.view(-1, VOCAB), x.detach().view(-1, VOCAB).softmax(-1)
    ),
    "sorted": lambda x: (x.sort(-1).values * BIAS).sum() + x.std() + x.max(),
    "linear": lambda x: (x @ torch.ones(VOCAB, 2, dtype=x.dtype)).square().sum(),
    "part": lambda x: x[..., 2:5].exp().sum() + x[..., 1].sum() + x[:, :, -1].prod(),
    "part of the dims": lambda x: x.transpose(1, 2)[:, 1].square().sum(),
    "function": lambda x: loss(Double.apply(x)) + loss(Double.apply(x * 2) / 3),
    "item in place": in_place(item),
    "tail in place": in_place(tail),
    "flat in place": in_place(flat),
    "list": lambda x: torch.stack([torch.stack([r.square().sum() for r in b]) for b in x]).sum(),
    "mean": lambda x: x.mean() + x.sum() + x.sum((0, 1))[2] + x.var(-1).sum(),
}


def pair() -> tuple[torch.Tensor, torch.Tensor, SplitLogits, slice]:
    """Whole logits, a rank's slice of them, both leaves, and split logits of the slice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, VOCAB, generator=draw, dtype=torch.float64)
    vocabulary = Vocabulary(even((VOCAB,), 0, mesh.size()).sizes, mesh)
    mine = slice(vocabulary.start, vocabulary.start + vocabulary.local)
    local = x[..., mine].clone().requires_grad_()
    return x.requires_grad_(), local, SplitLogits.of(local * 1, vocabulary), mine


def check(name: str) -> Any:
    do = {**LOCAL, **WHOLE}[name]
    x, local, split, mine = pair()
    expected = do(x)
    expected.backward()
    with count() as seen:
        found = do(split)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        found.backward()
    assert local.grad is not None and x.grad is not None
    torch.testing.assert_close(local.grad, x.grad[..., mine], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(do(split), expected.detach(), rtol=1e-12, atol=1e-12)
    return seen


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", LOCAL)
def test_on_slices(name: str) -> None:
    seen = check(name)
    gathers = {"unsqueeze": 1, "scaled in place": 1}.get(name, 0)
    assert seen["all_gather"] <= 2 * gathers, seen


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", WHOLE)
def test_on_the_whole(name: str) -> None:
    check(name)


@pytest.mark.ranks(2)
def test_mutations_are_noticed() -> None:
    with mutation.must_fail(Vocabulary, "copy", lambda self, x: x):
        check("log_softmax")
    with mutation.must_fail(Vocabulary, "sum", lambda self, x: x):
        check("entropy")
    with mutation.must_fail(pointwise, "changes_first", lambda func: True):
        x, _, split, _ = pair()
        torch.testing.assert_close(BIAS.clone().view(1, 1, -1).add(split), BIAS + x)
        torch.testing.assert_close(torch.zeros_like(x).add_(split), x + 0)
        raise AssertionError("reached only to meet the others")


@pytest.mark.ranks(2)
def test_a_scale_that_is_learned() -> None:
    x, _, split, _ = pair()
    grads = []
    for logits in (x, split):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        shift = torch.ones(2, 4, 1, dtype=torch.float64, requires_grad=True)
        bias = BIAS.clone().requires_grad_()
        loss(logits * scale + shift * logits.detach().cos() + bias).backward()
        grads.append((scale.grad, shift.grad, bias.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_it_looks_whole_and_prints_in_silence() -> None:
    x, local, split, _ = pair()
    with count() as seen:
        assert split.shape == x.shape and split.dtype == x.dtype and split.device == x.device
        assert split.size(-1) == VOCAB and split.numel() == x.numel() and len(split) == 2
        assert split.requires_grad and split.grad_fn is not None and not split.is_leaf
        assert split.ndim == 3 and split.is_floating_point() and split.is_contiguous()
        assert isinstance(split, torch.Tensor) and hash(split) == id(split)
        assert f"of {VOCAB} on this rank" in f"{split} {split!r} {split!s}"
        assert not split.detach().requires_grad and type(split.detach()) is SplitLogits
        assert torch.equal(split.data.local, local.detach())
        assert split.local.shape == split[0:2].local.shape
        assert split.to("cpu") is split and split.double() is split and split.contiguous() is split
    assert seen == {}


@pytest.mark.ranks(2)
def test_copies_and_files_and_numpy() -> None:
    x, _, split, _ = pair()
    plain, split = x.detach(), split.detach()
    copied = copy.deepcopy({"logits": split})["logits"]
    assert type(copied) is SplitLogits and torch.equal(copied.whole(), plain)
    read = pickle.loads(pickle.dumps(split))
    assert type(read) is torch.Tensor and torch.equal(read, plain)
    file = io.BytesIO()
    torch.save(split, file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain)
    assert (split.numpy() == plain.numpy()).all() and split.tolist() == plain.tolist()
    assert split[0, 0, 0].item() == plain[0, 0, 0].item()
    assert torch.equal(split.argmax(-1), plain.argmax(-1))
    assert torch.equal(split.argmax(-1, keepdim=True), plain.argmax(-1, keepdim=True))
    same = torch.zeros_like(split)
    assert torch.equal(same.argmax(-1), torch.zeros(2, 4, dtype=torch.long)), "the first of equals"
    assert torch.equal(split.topk(2).indices, plain.topk(2).indices)
    with torch.inference_mode():
        made = split * 1
        made[..., 2] = 5.0
        assert torch.equal(made.argmax(-1), torch.full((2, 4), 2))


@pytest.mark.ranks(2)
def test_gradients_of_the_logits_themselves() -> None:
    x, _, split, _ = pair()
    plain = x * 1
    seen: list[torch.Tensor] = []
    plain.retain_grad()
    split.retain_grad()
    split.register_hook(seen.append)
    expected = torch.autograd.grad(loss(plain), plain)[0]
    found = torch.autograd.grad(loss(split), split)[0]
    assert type(found) is SplitLogits
    torch.testing.assert_close(found.whole(), expected)
    loss(split).backward()
    loss(plain).backward()
    torch.testing.assert_close(split.grad.whole(), plain.grad)
    torch.testing.assert_close(seen[-1].whole(), expected)
    x, local, split, mine = pair()
    (x * 1).register_hook(lambda grad: grad * 2)
    split.register_hook(lambda grad: grad * 2)
    loss(split).backward()
    loss(x).backward()
    torch.testing.assert_close(local.grad, 2 * x.grad[..., mine])


@pytest.mark.ranks(2)
def test_what_makes_no_sense_on_a_slice_is_refused() -> None:
    x, _, split, _ = pair()
    with pytest.raises(PlaitError, match="resize_"):
        split.resize_(3)
    with pytest.raises(PlaitError, match="set_"):
        split.set_(x.detach())
    with pytest.raises(PlaitError, match="data or grad"):
        split.data = x.detach()
    with pytest.raises(PlaitError, match="out="):
        torch.add(x.detach(), 1, out=split)
    changed = split * 1
    changed.mul_(2)
    with pytest.raises(PlaitError, match="changed in place"):
        Double.apply(changed).sum().backward()
