"""generate() on a split model: the same tokens as one process, on every rank."""

import contextlib
import copy
import time

import pytest
import torch

from plait import comm
from plait.errors import LayoutError, PlaitError, RankError
from plait.hf.generation import inputs, install, randomness, uninstall
from tests.ranks.generation_models import prompt, split_model, tp_mesh, whole_model

WAYS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 0},
    "sampled-top-k": {"do_sample": True, "top_k": 9, "temperature": 0.7, "top_p": 0.9},
    "beam-sample": {"do_sample": True, "num_beams": 3, "top_k": 11},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "static-chunked": {"cache_implementation": "static", "prefill_chunk_size": 2},
    "no-cache": {"use_cache": False},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "min-length": {"min_new_tokens": 4},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


def one_process(whole, seed: int = 0, **arguments):
    torch.manual_seed(seed)
    tokens = whole.generate(**arguments)
    return tokens, torch.get_rng_state()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_one_process_whatever_the_seeds(way, rank, world_size):
    whole = whole_model()
    model = split_model(whole, tp_mesh(world_size))
    arguments = {**prompt(1 if way == "lookup" else 3), "max_new_tokens": 12, **WAYS[way]}
    expected, state_after = one_process(whole, **arguments)
    torch.manual_seed(rank)
    own = torch.get_rng_state()
    tokens = model.generate(**arguments)
    assert torch.equal(tokens, expected)
    # Group rank 0's generator advanced as in one process, the others' did not move.
    assert torch.equal(torch.get_rng_state(), state_after if rank == 0 else own)


@pytest.mark.ranks(2)
def test_mutation_without_the_shared_generator_ranks_differ(rank, world_size, monkeypatch):
    monkeypatch.setattr(randomness, "borrowed", lambda *_: contextlib.nullcontext())
    model = split_model(whole_model(), tp_mesh(world_size))
    torch.manual_seed(rank)
    with pytest.raises(RankError, match="rank 1 came to other tokens"):
        model.generate(**prompt(), max_new_tokens=12, do_sample=True, top_k=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_that_stop_early_are_padded_alike(do_sample, rank, world_size):
    whole = whole_model()
    arguments = {**prompt(), "max_new_tokens": 16, "do_sample": do_sample}
    free, _ = one_process(whole, eos_token_id=[], **arguments)
    # The third new token of row 0 and the sixth of row 1 end them.
    eos = [int(free[0, 7]), int(free[1, 10])]
    expected, _ = one_process(whole, eos_token_id=eos, **arguments)
    assert (expected == 0).sum() > (arguments["input_ids"] == 0).sum()
    torch.manual_seed(rank)
    model = split_model(whole, tp_mesh(world_size))
    assert torch.equal(model.generate(eos_token_id=eos, **arguments), expected)


@pytest.mark.ranks(2)
def test_dict_results_hold_scores_and_logits_of_one_process(rank, world_size):
    whole = whole_model()
    arguments = {
        **prompt(), "max_new_tokens": 4, "do_sample": True, "output_scores": True,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected, _ = one_process(whole, **arguments)
    torch.manual_seed(rank)
    result = split_model(whole, tp_mesh(world_size)).generate(**arguments)
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(result.logits, expected.logits)
    torch.testing.assert_close(result.scores, expected.scores)


@pytest.mark.ranks(2)
def test_assistants(rank, world_size):
    whole = whole_model()
    mesh = tp_mesh(world_size)
    model, assistant = split_model(whole, mesh), whole_model(initializer_range=0.1)
    arguments = {**prompt(1), "max_new_tokens": 10}
    expected, _ = one_process(whole, **arguments)
    # A whole assistant, a split one, and the model's own first layer.
    assert torch.equal(model.generate(assistant_model=assistant, **arguments), expected)
    split_assistant = split_model(assistant, mesh)
    assert torch.equal(model.generate(assistant_model=split_assistant, **arguments), expected)
    assert torch.equal(model.generate(assistant_early_exit=1, **arguments), expected)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.ranks(2)
def test_only_rank_zero_streams(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    streamer = Recorder()
    tokens = model.generate(**prompt(1), max_new_tokens=5, streamer=streamer)
    assert streamer.tokens == (tokens.flatten().tolist() if rank == 0 else [])
    assert streamer.ended == (rank == 0)
    # On rank 0 alone is right as well; what transformers refuses is refused on every rank.
    alone = Recorder() if rank == 0 else None
    assert torch.equal(model.generate(**prompt(1), max_new_tokens=5, streamer=alone), tokens)
    with pytest.raises(ValueError, match="streamer"):
        model.generate(**prompt(1), max_new_tokens=5, streamer=alone, num_beams=2)


@pytest.mark.ranks(2)
def test_an_iterator_is_ended_on_every_rank(rank, world_size):
    from transformers import TextIteratorStreamer

    class Tokenizer:
        def decode(self, tokens, **_):
            return " ".join(map(str, tokens))

    streamer = TextIteratorStreamer(Tokenizer(), timeout=10)
    split_model(whole_model(), tp_mesh(world_size)).generate(
        **prompt(1), max_new_tokens=3, streamer=streamer
    )
    assert bool("".join(streamer)) == (rank == 0)


def _slow_clock(monkeypatch, rank: int) -> None:
    """Rank 1's clock runs far ahead: alone, it would stop after its first token."""
    start = time.time()
    monkeypatch.setattr(time, "time", lambda: start + 100 * rank + next(ticks))
    ticks = iter([1000.0 * rank * step for step in range(1000)])


@pytest.mark.ranks(2)
def test_rank_zero_decides_when_time_is_up(rank, world_size, monkeypatch):
    model = split_model(whole_model(), tp_mesh(world_size))
    full = model.generate(**prompt(), max_new_tokens=6)
    _slow_clock(monkeypatch, rank)
    tokens = model.generate(**prompt(), max_new_tokens=6, max_time=50.0)
    assert torch.equal(tokens, full)


@pytest.mark.ranks(2)
def test_mutation_with_a_clock_each_the_ranks_part(rank, world_size, monkeypatch):
    monkeypatch.setattr(
        "plait.hf.generation.binding.decide_at_rank_zero", lambda criteria, mesh: criteria
    )
    model = split_model(whole_model(), tp_mesh(world_size))
    mesh = model._plait_generation.mesh
    before = comm.set_timeout(mesh, 5)
    _slow_clock(monkeypatch, rank)
    with pytest.raises(RankError):
        model.generate(**prompt(), max_new_tokens=6, max_time=50.0)
    comm.set_timeout(mesh, before)


@pytest.mark.ranks(2)
def test_rank_zeros_criteria_and_processors_count(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    calls = []

    def after(limit):
        def criterion(input_ids, scores, **_):
            calls.append(input_ids.shape[1])
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= limit)

        return criterion

    tokens = model.generate(
        **prompt(), max_new_tokens=9, stopping_criteria=[after(9 if rank == 0 else 7)]
    )
    assert tokens.shape == (3, 9) and calls == [6, 7, 8, 9]

    def favour(input_ids, scores):
        scores[:, 50 + rank] += 1e3
        return scores

    tokens = model.generate(**prompt(), max_new_tokens=3, logits_processor=[favour])
    assert (tokens[:, 5:] == 50).all()


@pytest.mark.ranks(2)
def test_stop_strings(rank, world_size):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    whole = whole_model()
    vocab = {chr(ord("a") + i): i for i in range(whole.config.vocab_size)}
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    arguments = {**prompt(1), "max_new_tokens": 8, "tokenizer": tokenizer}
    free, _ = one_process(whole, **prompt(1), max_new_tokens=8)
    stop = tokenizer.decode(free[0, 6:8])
    assert len(stop) == 2
    expected, _ = one_process(whole, stop_strings=[stop], **arguments)
    assert expected.shape == (1, 8) and free.shape == (1, 13)
    model = split_model(whole, tp_mesh(world_size))
    assert torch.equal(model.generate(stop_strings=[stop], **arguments), expected)


@pytest.mark.ranks(2)
def test_a_failing_criterion_fails_every_rank(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))

    def criterion(input_ids, scores, **_):
        if rank == 1:
            raise ZeroDivisionError("broken on rank 1")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == 1 else RankError, match="broken on rank 1"):
        model.generate(**prompt(), max_new_tokens=5, stopping_criteria=[criterion])
    assert time.monotonic() - start < 5
    # and the model is as before
    assert "_plait_output" not in vars(model.lm_head) and model._plait_generation.call is None
    assert model.generate(**prompt(), max_new_tokens=2).shape == (3, 7)


@pytest.mark.ranks(2, 3)
def test_different_shapes_are_a_layout_error_on_all_ranks(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    ids = torch.ones(2, 5 + (rank == 1), dtype=torch.long)
    start = time.monotonic()
    with pytest.raises(LayoutError) as caught:
        model.generate(ids, max_new_tokens=3)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert "inputs differs" in message
    assert "rank 1: int64 (2, 6)" in message and "0" in message and "int64 (2, 5)" in message


def _differing(rank: int) -> dict:
    return {
        "attention_mask": torch.ones(3, 5, dtype=torch.long) * (1 - rank),
        "input_ids": torch.full((3, 5), 5 + rank),
        "max_new_tokens": 3 + rank,
        "do_sample": bool(rank),
        "bad_words_ids": [[i + rank] for i in range(50)],
        "use_cache": None if rank else False,
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", _differing(0))
def test_any_other_difference_is_named_on_all_ranks(name, rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    with pytest.raises(LayoutError, match=rf"{name}.*differ.*rank 0.*rank 1"):
        model.generate(**{**prompt(), "max_new_tokens": 3, name: _differing(rank)[name]})


@pytest.mark.ranks(2)
def test_mutation_unseen_difference_of_values(rank, world_size, monkeypatch):
    monkeypatch.setattr(inputs, "digest", lambda tensor: "")
    model = split_model(whole_model(), tp_mesh(world_size))
    with pytest.raises(PlaitError) as caught:
        model.generate(torch.full((3, 5), 5 + rank), max_new_tokens=3)
    assert "values differ" not in str(caught.value)


@pytest.mark.ranks(2)
def test_a_deep_copy_generates_by_itself(rank, world_size):
    whole = whole_model()
    model = split_model(whole, tp_mesh(world_size))
    twin = copy.deepcopy(model)
    assert twin.generate.__self__ is twin and model.generate.__self__ is model
    with torch.no_grad():
        twin.model.embed_tokens.weight.mul_(-1)
    assert torch.equal(
        model.generate(**prompt(), max_new_tokens=6), whole.generate(**prompt(), max_new_tokens=6)
    )
    assert not torch.equal(
        twin.generate(**prompt(), max_new_tokens=6), model.generate(**prompt(), max_new_tokens=6)
    )


@pytest.mark.ranks(2)
def test_paged_caches_are_refused_by_name(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    for call in (
        lambda: model.generate(**prompt(), cache_implementation="paged"),
        lambda: model.generate_batch([[1, 2]]),
    ):
        with pytest.raises(LayoutError, match="paged cache"):
            call()


@pytest.mark.ranks(1)
def test_nothing_is_installed_on_one_rank(rank, world_size):
    model = whole_model()
    before = set(vars(model))
    install(model, tp_mesh(1))
    assert set(vars(model)) == before


@pytest.mark.ranks(2)
def test_uninstall_leaves_the_class_methods(rank, world_size):
    model = split_model(whole_model(), tp_mesh(world_size))
    uninstall(model)
    assert "generate" not in vars(model) and "_plait_generation" not in vars(model)
    assert not hasattr(type(model), "_plait_generation")
