"""Thirty architectures of the sweep, on 2, 3 or 4 ranks: equal to one process."""

import pytest

from plait.styles import linear_forwards
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
        ("causal/gpt_oss", "uneven"),
        ("causal/deepseek_v3", "uneven"),
        ("causal/phi3", "uneven"),
        ("causal/gpt2", "uneven"),
        ("causal/bloom", "pairs"),
        ("causal/gpt_neox", "uneven"),
        ("causal/qwen3_next", "ordinary"),
        ("causal/jamba", "ordinary"),
        ("seq2seq/t5", "uneven"),
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
        ("causal/cohere", "uneven"),
        ("causal/starcoder2", "uneven"),
        ("causal/gptj", "ordinary"),
        ("image-text/qwen3_vl", "ordinary"),
    ),
}
"""Model and shape by number of ranks."""


def result_of(name: str, shape: str, size: int) -> cases.Result:
    (model,) = models(f"^{name}$")
    return cases.Result(**cases.run_case(Case(model, shape, size)))


def check(name: str, shape: str, size: int) -> None:
    result = result_of(name, shape, size)
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
    with mutation.must_fail(linear_forwards, "sum_from", lambda x, mesh, **_: x):
        check("causal/llama", "ordinary", 2)
