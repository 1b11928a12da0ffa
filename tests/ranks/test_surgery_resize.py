"""resize_token_embeddings of a split model: what one process gives, whatever the seeds."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import plait
from plait.errors import PlaitError, RankError
from plait.hf import resizing
from plait.state import state_of
from plait.testing import add_noise, mutation, parity, tiny

WHOLE_ENDS = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
SPLIT_ENDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
OTHER_ENDS = {"model.embed_tokens": "embedding_colwise", "lm_head": "rowwise_split_input"}


def rank() -> int:
    return torch.distributed.get_rank()


def plain(name: str) -> Any:
    if name == "phi":  # a head with a bias
        fields = {**tiny.SIZES, "num_key_value_heads": 24}
        config = transformers.AutoConfig.for_model("phi", **fields)
        torch.manual_seed(0)
        return add_noise(transformers.AutoModelForCausalLM.from_config(config).double().eval())
    return add_noise(tiny.model(name))


def both(name: str, plan: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """A split and a whole model after the same resizing; the ranks' seeds differ."""
    split, whole = plait.parallelize(plain(name), tp_plan=plan), plain(name)
    torch.manual_seed(3 + rank())
    given = split.resize_token_embeddings(**arguments)
    assert given is split.get_input_embeddings()
    after = torch.rand(())
    torch.manual_seed(3)
    whole.resize_token_embeddings(**arguments)
    if rank() == 0:
        assert after == torch.rand(()), "the first rank's generator is where one process's is"
    else:
        torch.manual_seed(3 + rank())
        assert after == torch.rand(()), "the other ranks keep their own random numbers"
    return split, whole


def check(split: Any, whole: Any, name: str) -> None:
    expected, found = whole.state_dict(), plait.full_state_dict(split)
    assert expected.keys() == found.keys()
    for key, x in expected.items():
        assert torch.equal(found[key], x), key
    assert split.config.get_text_config().vocab_size == whole.config.get_text_config().vocab_size
    assert (
        split.get_input_embeddings().num_embeddings == whole.get_input_embeddings().num_embeddings
    )
    head = split.get_output_embeddings()
    assert head.out_features == whole.get_output_embeddings().out_features
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert (head.weight is split.get_input_embeddings().weight) == tied
    for part in split.modules():
        state = state_of(part)
        for key, param in part.named_parameters() if state is not None else ():
            assert state.layouts[key].shape == tuple(param.shape), key
            assert state.layouts[key].local_shape(rank()) == tuple(param.to_local().shape), key
    parity.compare(split, whole, tiny.batch(name))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("number", [101, 70, 120])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_grown_and_shrunk(name: str, number: int, mean: bool) -> None:
    split, whole = both(name, new_num_tokens=number, mean_resizing=mean)
    if number < 95:
        split.config.eos_token_id = whole.config.eos_token_id = 2
        ids = torch.arange(3, 10)[None]
        with torch.no_grad():
            torch.testing.assert_close(split(ids).logits, whole(ids).logits)
        return
    check(split, whole, name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("plan", [WHOLE_ENDS, SPLIT_ENDS, OTHER_ENDS])
@pytest.mark.parametrize("name", ["phi", "qwen2", "cohere"])
def test_ends_of_every_cut(name: str, plan: dict[str, str]) -> None:
    if name == "cohere":  # tied: the head follows
        plan = {"model.embed_tokens": plan["model.embed_tokens"]}
    split, whole = both(name, plan, new_num_tokens=100, pad_to_multiple_of=6)
    assert split.config.vocab_size == 102
    check(split, whole, name)


@pytest.mark.ranks(2)
def test_padding_alone_and_nothing_to_do() -> None:
    split, whole = both("llama", pad_to_multiple_of=64)
    assert split.config.vocab_size == 128
    check(split, whole, "llama")
    before = split.lm_head.weight
    assert split.resize_token_embeddings() is split.get_input_embeddings()
    assert split.resize_token_embeddings(128, mean_resizing=False) is split.model.embed_tokens
    assert split.lm_head.weight is before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llava"])
def test_training_generating_and_saving_afterwards(name: str, tmp_path: Path) -> None:
    split, whole = both(name, new_num_tokens=103)
    batch = tiny.batch(name)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (split, whole)]
    with parity.exact():
        for model, optimizer in zip((split, whole), optimizers, strict=True):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    parity.compare(split, whole, batch)
    inputs = {k: v[:1] for k, v in batch.items() if k != "labels"}
    asked = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(split.generate(**inputs, **asked), whole.generate(**inputs, **asked))
    split.save_pretrained(tmp_path / "saved")
    again = type(whole).from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert again.config.get_text_config().vocab_size == 103
    for key, x in plait.full_state_dict(split).items():
        assert torch.equal(again.state_dict()[key], x), key
    kind = "AutoModelForImageTextToText" if name == "llava" else "AutoModelForCausalLM"
    config = plait.DistributedConfig(tp_size=torch.distributed.get_world_size())
    read = getattr(plait, kind).from_pretrained(
        tmp_path / "saved", dtype=torch.float64, distributed_config=config
    )
    parity.compare(read, again, batch)


@pytest.mark.ranks(2, 3)
def test_ranks_that_ask_for_different_numbers_change_nothing() -> None:
    split = plait.parallelize(plain("llama"))
    before = dict(split.named_parameters())
    with pytest.raises(RankError, match=rf"rank {rank()} asks for {100 + rank()} tokens"):
        split.resize_token_embeddings(100 + rank())
    same = split.config.vocab_size  # on one rank nothing would change
    with pytest.raises(RankError, match=rf"rank {rank()} asks for {same + rank()} tokens"):
        split.resize_token_embeddings(same + rank())
    assert all(param is before[name] for name, param in split.named_parameters())
    with pytest.raises(PlaitError, match="inside a split model"):
        split.model.resize_token_embeddings(100)
    parity.compare(split, plain("llama"), tiny.batch("llama"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_failure_leaves_the_model_as_it_was(name: str) -> None:
    split = plait.parallelize(plain(name))
    before = dict(split.named_parameters(remove_duplicate=False))

    def broken(*args: Any) -> None:
        raise MemoryError("no room")

    with mutation.patched(resizing, "cut_plain", broken):
        with pytest.raises(MemoryError):
            split.resize_token_embeddings(100)
    now = dict(split.named_parameters(remove_duplicate=False))
    assert all(now[key] is param for key, param in before.items())
    assert split.config.vocab_size == 96
    parity.compare(split, plain(name), tiny.batch(name))


@pytest.mark.ranks(2)
def test_a_copy_is_not_resized_with_its_original() -> None:
    split = plait.parallelize(plain("llama"))
    copied = copy.deepcopy(split)
    split.resize_token_embeddings(100)
    check(copied, plain("llama"), "llama")
    copied.resize_token_embeddings(99, mean_resizing=False)
    assert split.lm_head.weight.shape[0] == 100


@pytest.mark.ranks(2)
def test_the_random_numbers_of_the_first_rank_are_needed() -> None:
    from contextlib import nullcontext

    def rows() -> None:
        torch.manual_seed(3 + rank())
        split = plait.parallelize(plain("llama"))
        split.resize_token_embeddings(120, mean_resizing=False)
        found = plait.full_state_dict(split)["lm_head.weight"]
        torch.manual_seed(3)
        whole = plain("llama")
        whole.resize_token_embeddings(120, mean_resizing=False)
        assert torch.equal(found, whole.lm_head.weight)

    rows()
    with mutation.must_fail(resizing, "borrowed", lambda states, device: nullcontext()):
        rows()
