"""Dropout: the same where tensors are whole, the rank's own where split, the same recomputed."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait.comm import count
from plait.run import streams
from plait.styles import randomness
from plait.testing import mutation, parity
from tests.ranks.dropout_masks import SIZES, batch, checkpointed, pair, watching

MODELS = [*SIZES, "blocks"]


def everywhere(value: Any) -> list[Any]:
    """A value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def seed_by_rank() -> None:
    torch.manual_seed(1000 + 17 * dist.get_rank())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MODELS)
def test_with_the_same_masks_one_process_has_the_same_gradients(name: str) -> None:
    split, whole = pair(name)
    seed_by_rank()
    with watching(split, whole) as masks:
        parity.compare(split, whole, batch(name))
    kinds = [kind for _, kind in masks.kept]
    assert kinds.count(streams.OPENED) >= 2, "a split tensor was dropped like a whole one"
    whole_masks = [mask for mask, kind in masks.kept if kind == streams.SHARED]
    for other in everywhere(whole_masks):
        assert all(map(torch.equal, other, whole_masks)), "ranks drop other elements of one tensor"
    own = everywhere([mask for mask, kind in masks.kept if kind == streams.OPENED])
    for first, second in ((a, b) for a in range(len(own)) for b in range(a)):
        same = [torch.equal(x, y) for x, y in zip(own[first], own[second], strict=True)]
        assert not any(same), "two ranks drop the same elements of different tensors"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "blocks"])
def test_what_is_recomputed_drops_the_same(name: str, use_reentrant: bool) -> None:
    split, whole = pair(name)
    checkpointed(split, use_reentrant)
    if name != "blocks":
        for model in (split, whole):
            model.enable_input_require_grads()
    seed_by_rank()
    with watching(split, whole) as masks:
        parity.compare(split, whole, batch(name))
    outside = 4 if name == "t5" else 1  # those of the embeddings, and T5's last, are in no block
    assert masks.num_recomputed >= len(masks.kept) - outside > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_inside_the_attention_kernel(use_reentrant: bool) -> None:
    """`scaled_dot_product_attention` drops by itself: recomputed it has to drop the same."""
    split, _ = pair("llama", attention="sdpa")
    found = []
    for recomputed in (False, True, True):
        if recomputed:
            checkpointed(split, use_reentrant)
            split.enable_input_require_grads()
        torch.manual_seed(5)
        split.zero_grad()
        loss = split(**batch("llama")).loss
        loss.backward()
        found.append((loss.item(), {n: g.double() for n, g in plait.full_grads(split).items()}))
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], rtol=1e-5, atol=1e-6)
    assert len(set(everywhere(found[0][0]))) == 1


@pytest.mark.ranks(2, 3)
def test_steps_seeds_and_what_is_left_of_the_generator() -> None:
    split, _ = pair("gpt2")

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return split(**batch("gpt2")).logits

    seed_by_rank()
    first, second = logits(), logits()
    assert not torch.equal(first, second), "two steps drop the same"
    left = torch.get_rng_state()
    seed_by_rank()
    for _ in range(2):
        streams.drawn()
    assert torch.equal(left, torch.get_rng_state()), "a forward takes one number, whatever it drops"
    torch.manual_seed(3 if dist.get_rank() == 0 else torch.seed())
    third = logits()
    torch.manual_seed(3)
    assert torch.equal(third, logits()), "the first rank's seed decides"
    assert len({x.sum().item() for x in everywhere(third)}) == 1


@pytest.mark.ranks(4)
def test_ranks_of_other_samples_drop_others_even_with_one_seed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    split, whole = pair("gpt2", mesh)
    torch.manual_seed(11)
    with torch.no_grad(), watching(split, whole) as masks:
        split(**batch("gpt2"))
    data = mesh.get_local_rank("dp_replicate")
    kept = everywhere((data, masks.kept))
    for other, others in kept:
        for (mine, kind), (theirs, _) in zip(masks.kept, others, strict=True):
            if kind == streams.SHARED:
                assert torch.equal(mine, theirs) == (other == data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_where_nothing_is_dropped_nothing_is_done(name: str) -> None:
    split, _ = pair(name)
    split.eval()
    quiet, _ = pair(name, **{key: 0.0 for key in SIZES[name] if "drop" in key})
    for model in (split, quiet):
        torch.manual_seed(dist.get_rank())
        before = torch.get_rng_state()
        with count() as calls:
            model(**batch(name)).loss.backward()
        assert "broadcast" not in calls
        assert torch.equal(before, torch.get_rng_state())
        assert not any(randomness._INNER in part.__dict__ for part in model.modules())
    split.train()
    with count() as calls:
        split(**batch(name)).loss.backward()
    assert calls["broadcast"] == 1 and calls.bytes["broadcast"] == 8


@pytest.mark.ranks(2)
def test_dropouts_that_train_in_a_model_that_does_not() -> None:
    """Monte-Carlo dropout: only the dropouts are in training mode."""
    split, whole = pair("bert")
    for model in (split, whole):
        model.eval()
        for part in model.modules():
            part.train(isinstance(part, nn.Dropout))
    seed_by_rank()
    with torch.no_grad(), watching(split, whole) as masks:
        parity.compare(split, whole, batch("bert"), grads=False)
    assert len(masks.kept) > 3


@pytest.mark.ranks(2)
def test_whole_layers_are_skipped_by_all_ranks_or_none() -> None:
    split, _ = pair("opt", layerdrop=0.5, num_hidden_layers=4)
    seed_by_rank()
    seen = set()
    for _ in range(6):
        with count() as calls:
            loss = split(**batch("opt")).loss
            loss.backward()
        split.zero_grad()
        assert len(set(everywhere(loss.item()))) == 1
        seen.add(calls["all_reduce"])
    assert len(seen) > 1, "no layer was ever skipped"


@pytest.mark.ranks(2)
def test_the_mean_is_kept_and_ranks_are_independent() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 40_000), nn.Dropout(0.25), nn.Linear(40_000, 4))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    plait.parallelize(model, tp_plan={"0": "colwise", "2": "rowwise"})
    kept = []
    model[1].register_forward_hook(lambda part, args, output: kept.append(output.detach()))
    model(torch.zeros(1, 4))
    mine = kept[0].flatten().double()
    assert abs(mine.mean() - 1) < 0.02, "the mean of what is left is that of the whole"
    own, other = everywhere(mine)
    shared = torch.corrcoef(torch.stack([own, other]))[0, 1]
    assert abs(shared) < 0.04, "ranks drop independently of one another"


@pytest.mark.ranks(2)
def test_dropouts_that_came_later_and_copies() -> None:
    split, whole = pair("blocks")
    for model in (split, whole):
        model.eval()
        for block in model.blocks:
            block.inner, block.dropout = 0.0, nn.Identity()
    split.train()
    with count() as calls:
        split(**batch("blocks"))
    assert "broadcast" not in calls
    copies = [copy.deepcopy(model).train() for model in (split, whole)]
    for model in copies:
        for block in model.blocks:
            block.dropout = nn.Dropout(0.5)
    seed_by_rank()
    with watching(copies[0], copies[1]) as masks:
        parity.compare(copies[0], copies[1], batch("blocks"))
    assert [kind for _, kind in masks.kept] == [streams.SHARED] * 2


MUTATIONS = {
    "ranks drop the same of what is split": (streams, "begin_own", lambda rank, kind=0: False),
    "ranks go on with their own numbers": (streams, "end_own", lambda kind=0: False),
    "the ranks do not agree on a number": (randomness, "broadcast", lambda x, mesh: x),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_tests_notice(what: str) -> None:
    with mutation.must_fail(*MUTATIONS[what]):
        test_with_the_same_masks_one_process_has_the_same_gradients("blocks")


@pytest.mark.ranks(2)
def test_python_s_and_numpy_s_numbers_are_agreed_on_too() -> None:
    class Masking(nn.Module):
        """As the audio models mask frames."""

        def __init__(self) -> None:
            super().__init__()
            self.mask_time_prob = 0.5

        def forward(self, x: torch.Tensor) -> list[float]:
            return [random.random(), float(np.random.rand())]

    model = Masking()
    plait.parallelize(model, tp_plan={})
    model(torch.ones(1))  # the ranks have met
    random.seed(dist.get_rank()), np.random.seed(dist.get_rank())
    first, second = model(torch.ones(1)), model(torch.ones(1))
    after = float(np.random.rand())  # Python's own are drawn from by the type checks of tests
    assert everywhere(first) == [first] * 2 and first != second
    np.random.seed(dist.get_rank())
    assert after == float(np.random.rand()), "the user's own go on"


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_compiled_models_drop_in_the_same_way() -> None:
    split, whole = pair("blocks")
    seed_by_rank()
    compiled = torch.compile(split, backend="eager")
    with torch.no_grad(), watching(split, whole) as masks:
        compiled(**batch("blocks"))
    kinds = [kind for _, kind in masks.kept]
    assert kinds == [streams.OPENED, streams.SHARED] * 2
    other = everywhere([mask for mask, _ in masks.kept])
    equal = [torch.equal(a, b) for a, b in zip(*other, strict=True)]
    assert equal == [False, True] * 2


@pytest.mark.ranks(2)
def test_blocks_of_code_among_split_and_whole_tensors() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            mesh = plait.state.state_of(self).tp_mesh
            found = [F.dropout(x)]
            with randomness.split_randomness(mesh):
                found.append(F.dropout(x[: 3 + dist.get_rank()]))
                with randomness.whole_randomness(mesh):
                    found.append(F.dropout(x))
                found.append(F.dropout(x))
            return [*found, F.dropout(x)]

    model = Both()
    model.p_drop = 0.5
    plait.parallelize(model, tp_plan={})
    seed_by_rank()
    found = everywhere(model(torch.ones(8, 8)))
    equal = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    assert equal == [True, False, True, False, True]
    kept = {tuple(x.flatten().tolist()) for x in found[0]}
    assert len(kept) == len(found[0]), "no mask comes twice"
