"""The records of an explained plan, and how equal layers are put together."""

import json

import pytest

from plait.plan.explain import Explanation
from plait.plan.explain_parts import (
    Call,
    Param,
    Part,
    block_of,
    padded_places,
    shared_heads,
    spans,
    tally,
)
from plait.plan.heads import Attention, head_map


def linear(name: str, size: int = 6, local: tuple[int, ...] = (4, 2), tied: str = "") -> Part:
    shapes = tuple((rows, 5) for rows in local)
    param = Param("weight", (size, 5), shapes, 2, tied=tied)
    return Part(name, "Linear", "MLP", "colwise", "model", (param,))


def norm(name: str) -> Part:
    param = Param("weight", (5,), ((5,), (5,)), 2)
    return Part(name, "Norm", "norms", "", "", (param,), why="small")


def call(module: str, size: int = 10) -> Call:
    return Call((module,), "forward", "all_reduce", size, "sum of the output")


def explained(*parts: Part, calls: tuple[Call, ...] = ()) -> Explanation:
    return Explanation("Model", 2, "bfloat16", parts, (), calls, (), (1, 8))


def test_bytes_of_whole_and_of_each_rank() -> None:
    found = explained(linear("layers.0.up"), norm("norm"))
    assert found.bytes == 60 + 10
    assert found.local_bytes == [40 + 10, 20 + 10]
    assert found.by_kind == {"MLP": (60, [40, 20]), "norms": (10, [10, 10])}


def test_a_tied_weight_is_counted_once_but_is_cut() -> None:
    found = explained(linear("embed"), linear("head", tied="embed.weight"))
    assert found.bytes == 60
    assert [row.pattern for row in found.split] == ["embed", "head"]


def test_equal_layers_are_one_row_and_others_are_not() -> None:
    found = explained(
        *(linear(f"layers.{n}.up") for n in range(3)), linear("layers.3.up", 8, (4, 4))
    )
    assert [(row.pattern, row.count) for row in found.split] == [
        ("layers.*.up", 3),
        ("layers.*.up", 1),
    ]
    assert [block.title for block in found.blocks] == ["layers.0-2", "layers.3"]


def test_a_layer_with_another_collective_is_a_block_of_its_own() -> None:
    parts = [linear(f"layers.{n}.up") for n in range(4)]
    calls = tuple(call(f"layers.{n}.up", 20 if n == 2 else 10) for n in range(4))
    found = explained(*parts, calls=calls)
    assert [(b.title, b.count) for b in found.blocks] == [("layers.0-1,3", 3), ("layers.2", 1)]
    assert sum(b.count * len(b.calls) for b in found.blocks) == len(calls)


def test_whole_parts_have_a_reason() -> None:
    found = explained(linear("up"), norm("norm"))
    assert [(row.pattern, row.part.why) for row in found.whole] == [("norm", "small")]


def test_to_dict_is_json_and_says_null_for_what_is_not_known() -> None:
    found = explained(linear("up"), calls=(call("up"),)).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["collectives"]["forward"] == {"all_reduce": {"calls": 1, "bytes": 10}}
    unknown = Explanation("Model", 2, "float32", (linear("up"),), (), (), ("why",), (1, 8))
    assert unknown.to_dict()["collectives"] is None


@pytest.mark.parametrize(
    ("heads", "shared", "padded"),
    [((9, 3, 2), (1,), (1, 2)), ((8, 4, 2), (), (0, 0)), ((8, 1, 2), (0,), (0, 0))],
)
def test_shared_and_padded_heads(heads, shared, padded) -> None:
    found = Attention("attn", 4, 4, head_map(*heads))
    assert shared_heads(found) == shared
    assert padded_places(found) == padded


def test_names_and_numbers() -> None:
    assert block_of("encoder.block.10.layer.0.k") == ("encoder.block", 10)
    assert block_of("lm_head") == ("lm_head", None)
    assert spans([5, 0, 1, 2]) == "0-2,5" and spans([]) == ""
    two = [call("a"), Call(("a",), "backward", "all_reduce", 4, "")]
    assert tally(two) == {"all_reduce": (2, 14)} and tally(two, "backward") == {
        "all_reduce": (1, 4)
    }
