"""What is said about tokens over a split vocabulary is what is said over the whole one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from plait.loss import SplitLogits, Vocabulary
from plait.loss import scores as module
from plait.loss.scores import Scores, scores
from plait.testing import mutation
from tests.ranks.test_loss import draw, labels_for


def slices(x: Tensor, sizes: list[int]) -> tuple[Tensor, SplitLogits]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = x.split(sizes, -1)[dist.get_rank()].clone().requires_grad_()
    return own, SplitLogits.of(own, Vocabulary.over(sizes, mesh))


def expected(x: Tensor, labels: Tensor) -> Scores:
    log_probs, valid = x.log_softmax(-1), labels != -100
    places = labels.clamp(min=0).unsqueeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return Scores(
        log_probs.gather(-1, places).squeeze(-1).masked_fill(~valid, 0),
        entropy.masked_fill(~valid, 0),
        (x.argmax(-1) == labels) & valid,
        valid,
    )


def same(ours: Scores, theirs: Scores) -> None:
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    torch.testing.assert_close(ours.entropy, theirs.entropy)
    assert torch.equal(ours.is_largest, theirs.is_largest)
    assert torch.equal(ours.valid, theirs.valid)


SIZES = {2: [[9, 8], [0, 17]], 3: [[6, 6, 5], [17, 0, 0]]}


@pytest.mark.ranks(2, 3)
def test_scores_are_those_of_the_whole_vocabulary(world_size: int) -> None:
    for sizes in SIZES[world_size]:
        for batch in (1, 2, 3):
            x = draw(batch, 5, 17, scale=3.0).round(decimals=0).requires_grad_()  # with equal ones
            labels = labels_for(x)
            labels[0, 0] = int(x[0, 0].argmax())
            own, split = slices(x.detach(), sizes)
            ours, theirs = scores(split, labels), expected(x, labels)
            same(ours, theirs)
            assert not ours.entropy.requires_grad
            weights = draw(batch, 5, seed=2)
            (theirs.log_probs * weights).sum().backward()
            (ours.log_probs * weights).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(own.grad, x.grad.split(sizes, -1)[dist.get_rank()])
            same(scores(x.detach(), labels), theirs)
    half = draw(2, 5, 17).bfloat16()
    found = scores(slices(half, SIZES[world_size][0])[1], labels_for(half))
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32
    same(found, expected(half.float(), labels_for(half)))


@pytest.mark.ranks(2)
def test_an_entropy_of_a_slice_is_noticed() -> None:
    x = draw(2, 5, 17)

    def compare() -> None:
        same(scores(slices(x, SIZES[2][0])[1], labels_for(x)), expected(x, labels_for(x)))

    compare()
    with mutation.must_fail(module, "_entropy", lambda x, _: module.logsumexp(x, _) - x.mean(-1)):
        compare()
