"""Candidates instead of whole logits at a split head: the same tokens, bit for bit."""

import pytest
import torch

from plait import comm
from plait.comm import count
from plait.errors import LayoutError
from plait.hf.generation import HeadExchange, binding, head
from plait.hf.generation.head import Selection, candidate_logits
from tests.ranks.generation_models import VOCAB, prompt, split_model, tp_mesh, whole_model

SAMPLING = {"do_sample": True, "top_k": 5, "max_new_tokens": 20}


def _record(monkeypatch) -> list[HeadExchange]:
    """Every HeadExchange made from here on."""
    made: list[HeadExchange] = []

    class Recorded(HeadExchange):
        def __init__(self, mesh):
            super().__init__(mesh)
            made.append(self)

    monkeypatch.setattr(binding, "HeadExchange", Recorded)
    return made


def _expected(whole, **arguments):
    torch.manual_seed(0)
    return whole.generate(**arguments)


def _tokens(model, rank, **arguments):
    torch.manual_seed(rank)
    return model.generate(**arguments)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("dtype", "grid"),
    [("float64", None), ("float64", 0.05), ("float32", 1.0), ("bfloat16", None)],
    ids=["plain", "ties", "many-ties", "bfloat16"],
)
@pytest.mark.parametrize(
    "how",
    [
        {"max_new_tokens": 20},
        SAMPLING,
        SAMPLING | {"temperature": 0.6, "top_p": 0.8},
        SAMPLING | {"min_p": 0.05, "num_return_sequences": 2},
    ],
    ids=["greedy", "top-k", "top-p", "min-p"],
)
def test_candidates_give_the_tokens_of_whole_logits(
    how, grid, dtype, rank, world_size, monkeypatch
):
    heads = _record(monkeypatch)
    whole = whole_model(grid=grid, dtype=getattr(torch, dtype))
    model = split_model(whole, tp_mesh(world_size))
    tokens = _tokens(model, rank, **prompt(), **how)
    assert heads[0].num_exchanges > (-1 if grid == 1.0 else 4)
    monkeypatch.setattr(binding, "selection_of", lambda *_: None)
    gathered = _tokens(model, rank, **prompt(), **how)
    assert heads[1].num_exchanges == 0 and heads[1].num_gathers == 20
    assert torch.equal(tokens, gathered)
    if dtype == "float64" or grid is not None:  # a product cut in parts may round differently
        assert torch.equal(tokens, _expected(whole, **prompt(), **how))


@pytest.mark.ranks(2)
def test_one_step_sends_one_small_message(rank, world_size, monkeypatch):
    heads = _record(monkeypatch)
    model = split_model(whole_model(), tp_mesh(world_size))
    with count() as steps:
        model.generate(**prompt(), max_new_tokens=20)
    # The head is the only split module: the first step gathers [3, vocab], the others [2, 3, 1].
    assert dict(steps) == {"all_gather": 20}
    assert steps.bytes["all_gather"] == 3 * VOCAB * 8 + 19 * world_size * 2 * 3 * 8
    assert (heads[0].num_gathers, heads[0].num_exchanges) == (1, 19)


WHOLE_LOGITS = {
    "no-top-k": {"do_sample": True, "top_k": 0},
    "large-k": {"do_sample": True, "top_k": 60},
    "top-h": {"do_sample": True, "top_k": 5, "top_h": 0.5},
    "beam": {"num_beams": 2},
    "penalty": {"repetition_penalty": 1.2},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "logits": {"output_logits": True, "return_dict_in_generate": True},
    "allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(VOCAB))},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", WHOLE_LOGITS)
def test_whole_logits_where_candidates_do_not_suffice(how, rank, world_size, monkeypatch):
    heads = _record(monkeypatch)
    whole = whole_model()
    arguments = {**prompt(), "max_new_tokens": 6, **WHOLE_LOGITS[how]}
    expected, tokens = (
        getattr(out, "sequences", out)
        for out in (
            _expected(whole, **arguments),
            _tokens(split_model(whole, tp_mesh(world_size)), rank, **arguments),
        )
    )
    assert torch.equal(tokens, expected)
    assert heads[0].num_exchanges == 0


@pytest.mark.ranks(2)
def test_users_hooks_and_processors_see_whole_logits(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    seen = []

    def processor(input_ids, scores):
        seen.append(scores.isfinite().all())
        return scores

    model.generate(**prompt(), max_new_tokens=6, logits_processor=[processor])
    for module in (model, model.lm_head):
        hook = module.register_forward_hook(
            lambda _, __, out: seen.append(getattr(out, "logits", out).isfinite().all())
        )
        model.generate(**prompt(), max_new_tokens=6)
        hook.remove()
    assert len(seen) == 18 and all(seen)


@pytest.mark.ranks(2)
def test_soft_capped_logits_are_gathered_whole(rank, world_size, monkeypatch):
    heads = _record(monkeypatch)
    whole = whole_model("gemma2", final_logit_softcapping=3.0)
    model = split_model(whole, tp_mesh(world_size))
    for how in ({"max_new_tokens": 10}, SAMPLING):
        tokens = _tokens(model, rank, **prompt(1), **how)
        assert torch.equal(tokens, _expected(whole, **prompt(1), **how))
    assert [made.num_exchanges for made in heads] == [0, 0]
    # Without a cap the same class hands its logits on.
    model.config.final_logit_softcapping = whole.config.final_logit_softcapping = None
    tokens = _tokens(model, rank, **prompt(1), **SAMPLING)
    assert torch.equal(tokens, _expected(whole, **prompt(1), **SAMPLING))
    assert heads[2].num_exchanges > 10


def _negate_in_place(module, args, output):
    output.logits.neg_()


@pytest.mark.ranks(2)
def test_logits_changed_in_place_are_noticed(rank, world_size, monkeypatch):
    heads = _record(monkeypatch)
    _negate_in_place.__module__ = "plait.tests"  # as if a style of plait's did it
    whole = whole_model()
    model = split_model(whole, tp_mesh(world_size))
    for one in (whole, model):
        one.register_forward_hook(_negate_in_place)
    expected = _expected(whole, **prompt(), max_new_tokens=10)
    assert torch.equal(_tokens(model, rank, **prompt(), max_new_tokens=10), expected)
    assert heads[0].num_exchanges == 0
    # Mutation: take the object for the value. The lowest candidate would win, not the lowest.
    monkeypatch.setattr(head.torch, "equal", lambda a, b: True)
    assert (_tokens(model, rank, **prompt(), max_new_tokens=10) != expected).any()


@pytest.mark.ranks(2)
def test_logits_changed_on_a_later_step_are_an_error(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    steps = []

    def later(module, args, output):
        steps.append(1)
        if len(steps) == 3:
            output.logits = output.logits * 2

    later.__module__ = "plait.tests"
    model.register_forward_hook(later)
    with pytest.raises(LayoutError, match="other logits than its lm_head"):
        model.generate(**prompt(), max_new_tokens=6)


@pytest.mark.ranks(2, 3)
def test_argmax_of_candidates_is_argmax_of_all(rank, world_size):
    mesh = tp_mesh(world_size)
    sizes = comm.chunk_sizes(VOCAB, world_size)
    generator = torch.Generator().manual_seed(3)
    inf, nan = float("inf"), float("nan")
    for case in range(60):
        logits = torch.randint(-3, 4, (4, 2, VOCAB), generator=generator).double()
        for row, special in enumerate((inf, -inf, nan)):
            where = torch.randint(VOCAB, (5,), generator=generator)
            if case % 2:
                logits[row, 0, where] = special
        if case == 1:
            logits[3] = -inf
        local = logits.split(sizes, dim=-1)[rank]
        candidates = candidate_logits(local, Selection(1), mesh, sizes)
        assert torch.equal(candidates.argmax(-1), logits.argmax(-1))


@pytest.mark.ranks(2, 3)
def test_top_k_of_candidates_is_top_k_of_all_or_refused(rank, world_size, monkeypatch):
    from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

    mesh = tp_mesh(world_size)
    sizes = comm.chunk_sizes(VOCAB, world_size)
    cool = TemperatureLogitsWarper(0.7)
    warp = TopKLogitsWarper(4)
    selection = Selection(4, (cool,), ties_kept=True)
    generator = torch.Generator().manual_seed(5)
    outcomes = {"equal": 0, "refused": 0}

    def run(logits):
        whole = warp(None, cool(None, logits.float()))
        local = logits.split(sizes, dim=-1)[rank]
        candidates = candidate_logits(local, selection, mesh, sizes)
        if candidates is None:
            return "refused"
        return "equal" if torch.equal(warp(None, cool(None, candidates.float())), whole) else "not"

    cases = []
    for case in range(80):
        levels = (6, 40, 1000)[case % 3]
        logits = torch.randint(levels, (1, VOCAB), generator=generator).double() / 8
        if case % 4 == 0:  # apart in float64, equal in float32
            logits += torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 1e-10
        if case % 9 == 0:
            logits[0, case] = float("nan")
        cases.append(logits)
        outcomes[run(logits)] += 1
    assert outcomes["equal"] > 20 and outcomes["refused"] > 20
    # Mutation: without the check of ties some sets of tokens come out too small.
    monkeypatch.setattr(head, "_cuts_a_tie", lambda *_: False)
    assert "not" in [run(logits) for logits in cases]


@pytest.mark.ranks(2)
def test_mutation_candidates_at_the_wrong_place(rank, world_size, monkeypatch):
    whole = whole_model()
    expected = _expected(whole, **prompt(), max_new_tokens=20)
    original = head.candidate_logits

    def shifted(local, selection, mesh, sizes):
        return original(local, selection, mesh, sizes).roll(1, -1)

    monkeypatch.setattr(head, "candidate_logits", shifted)
    tokens = _tokens(split_model(whole, tp_mesh(world_size)), rank, **prompt(), max_new_tokens=20)
    assert not torch.equal(tokens, expected)
