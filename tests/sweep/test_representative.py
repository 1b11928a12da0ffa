"""Thirty architectures of the sweep, on 2, 3 or 4 ranks: equal to one process, or refused."""

import pytest

from plait.styles import linear
from plait.testing import mutation
from tests.sweep import cases
from tests.sweep.catalogue import Case, models

CASES = {
    2: (
        ("causal/llama", "ordinary"),
        ("causal/qwen3", "uneven"),
        ("causal/gemma2", "few"),
        ("causal/gemma3_text", "ordinary"),
        ("causal/mixtral", "pairs"),
        ("causal/gpt_oss", "ordinary"),
        ("causal/deepseek_v3", "ordinary"),
        ("causal/phi3", "ordinary"),
        ("causal/gpt2", "ordinary"),
        ("causal/bloom", "ordinary"),
        ("causal/gpt_neox", "ordinary"),
        ("causal/qwen3_next", "ordinary"),
        ("causal/jamba", "ordinary"),
        ("seq2seq/t5", "ordinary"),
        ("seq2seq/bart", "ordinary"),
        ("image-text/llava", "ordinary"),
        ("image-text/qwen2_vl", "ordinary"),
    ),
    3: (
        ("causal/llama", "uneven"),
        ("causal/qwen3_moe", "ordinary"),
        ("causal/glm4", "ordinary"),
        ("causal/olmo2", "few"),
        ("causal/phi", "ordinary"),
        ("causal/falcon", "few"),
        ("image-text/gemma3", "ordinary"),
        ("seq2seq/mt5", "uneven"),
    ),
    4: (
        ("causal/llama", "few"),
        ("causal/cohere", "ordinary"),
        ("causal/starcoder2", "uneven"),
        ("causal/gptj", "ordinary"),
        ("image-text/qwen3_vl", "ordinary"),
    ),
}
"""Model and shape by number of ranks."""

MAY_BE_REFUSED = ("uneven", "few", "pairs")


def result_of(name: str, shape: str, size: int) -> cases.Result:
    (model,) = models(f"^{name}$")
    return cases.Result(**cases.run_case(Case(model, shape, size)))


def check(name: str, shape: str, size: int) -> None:
    result = result_of(name, shape, size)
    if result.status != "refused" or shape not in MAY_BE_REFUSED:
        assert result.status == "pass", result.detail
        assert result.held < 0.95, f"each rank holds {result.held:.0%}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "shape"), CASES[2])
def test_on_two_ranks(name: str, shape: str) -> None:
    check(name, shape, 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "shape"), CASES[3])
def test_on_three_ranks(name: str, shape: str) -> None:
    check(name, shape, 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "shape"), CASES[4])
def test_on_four_ranks(name: str, shape: str) -> None:
    check(name, shape, 4)


@pytest.mark.ranks(2)
def test_the_sweep_notices_a_missing_sum() -> None:
    check("causal/llama", "ordinary", 2)
    with mutation.must_fail(linear, "sum_from", lambda x, mesh, **_: x):
        check("causal/llama", "ordinary", 2)
