"""Rules, their merging, and the refusals of a plan that cannot be applied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan import ModelNames, PlanRules, generalize, matches, merge, resolve
from plait.plan.plan import type_problems

STYLES = ["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicate"]
STYLES += ["rowwise_split_input", "embedding_colwise"]


def model_names(tied: bool = False) -> ModelNames:
    linears = [f"model.layers.{n}.mlp.{w}" for n in (0, 1, 10) for w in ("w1", "w2")]
    modules = {"": "Lm", "model": "Base", "model.embed": "Embedding"}
    modules |= dict.fromkeys(linears, "Linear") | {"lm_head": "Linear"}
    params = {f"{name}.weight": (8, 4) for name in ["model.embed", *linears, "lm_head"]}
    return ModelNames(
        modules=modules,
        params=params,
        owners={name: name.rpartition(".")[0] for name in params},
        tied={"lm_head.weight": "model.embed.weight"} if tied else {},
        base_prefix="model",
        model="Lm",
    )


OWN = {
    "model.embed": "embedding_rowwise",
    "model.layers.*.mlp.w1": "colwise",
    "model.layers.*.mlp.w2": "rowwise",
    "lm_head": "colwise_gather_output",
}


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp", "layers.10.mlp", True),
        ("layers.*.mlp", "layers.x.mlp", False),
        ("layers.*.w1", "layers.3.w1", True),
        ("layers.*.w*", "layers.3.w1", False),
        ("layers.*", "layers.1.2", False),
        ("layers.1", "layers.10", False),
        ("a.b", "axb", False),
    ],
)
def test_star_stands_for_one_whole_number(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@given(st.lists(st.sampled_from(["layers", "w1", "0", "12", "mlp", "x9y"]), min_size=1))
def test_a_name_matches_its_own_pattern(parts: list[str]) -> None:
    name = ".".join(parts)
    assert matches(generalize(name), name)
    assert "1" not in generalize("w2.1")


def test_an_override_replaces_single_rules_and_an_empty_one_applies_none() -> None:
    assert merge(OWN, {"lm_head": "replicate"}) == {**OWN, "lm_head": "replicate"}
    assert merge(OWN, {}) == {}
    assert resolve(model_names(), OWN, {}, STYLES).entries == ()


def test_every_layer_number_is_found_and_nothing_else() -> None:
    plan = resolve(model_names(), OWN, None, STYLES)
    assert plan.by_style()["colwise"] == [f"model.layers.{n}.mlp.w1" for n in (0, 1, 10)]
    assert len(plan.entries) == 8


def test_names_may_be_relative_to_the_base_model() -> None:
    plan = resolve(model_names(), OWN, {"layers.*.mlp.w1": "replicate"}, STYLES)
    assert plan.rules["model.layers.*.mlp.w1"] == "replicate"
    assert "layers.*.mlp.w1" not in plan.rules


def test_the_rule_with_fewer_stars_decides() -> None:
    plan = resolve(model_names(), OWN, {"model.layers.1.mlp.w1": "replicate"}, STYLES)
    styles = {entry.name: entry.style for entry in plan.entries}
    assert styles["model.layers.1.mlp.w1"] == "replicate"
    assert styles["model.layers.10.mlp.w1"] == "colwise"


def test_all_problems_come_at_once_with_the_closest_names() -> None:
    wrong = {"layers.*.mlp.w3": "colwise", "model.embd": "colwise", "lm_head": "colwse"}
    with pytest.raises(PlanError) as caught:
        resolve(model_names(), OWN, wrong, STYLES)
    text = str(caught.value)
    assert "'layers.*.mlp.w3' matches no module" in text
    assert "model.layers.*.mlp.w1" in text
    assert "model.embed" in text
    assert "unknown style 'colwse'" in text and "closest styles: colwise" in text
    assert "rowwise_split_input" in text, "the allowed styles are listed"


def test_a_rule_that_is_no_pair_of_strings_is_refused() -> None:
    # Asked of the check itself: the annotations that the test run enforces would refuse it first.
    assert "is not a pair of strings" in type_problems("lm_head", 3)[0]
    assert type_problems("lm_head", "colwise") == []


def test_a_shipped_rule_that_matches_nothing_is_dropped() -> None:
    plan = resolve(model_names(), OWN | {"model.layers.*.experts": "colwise"}, None, STYLES)
    assert len(plan.entries) == 8


@pytest.mark.parametrize(
    ("own", "user", "head", "embed"),
    [
        (OWN, None, "colwise_gather_output", "embedding_rowwise"),
        ({"model.embed": "embedding_rowwise"}, None, "colwise_gather_output", "embedding_rowwise"),
        ({"lm_head": "colwise_gather_output"}, None, "colwise_gather_output", "embedding_rowwise"),
        (OWN, {"model.embed": "embedding_colwise"}, "rowwise_split_input", "embedding_colwise"),
        (OWN, {"lm_head": "replicate"}, "replicate", "replicate"),
    ],
)
def test_a_tied_weight_is_cut_once(own, user, head, embed) -> None:  # type: ignore[no-untyped-def]
    plan = resolve(model_names(tied=True), own, user, STYLES)
    styles = {entry.name: entry.style for entry in plan.entries}
    assert (styles["lm_head"], styles["model.embed"]) == (head, embed)


def test_two_rules_of_the_user_that_cut_a_tied_weight_differently_are_refused() -> None:
    user = {"lm_head": "colwise", "model.embed": "embedding_colwise"}
    with pytest.raises(PlanError, match="cuts a tied weight in two ways"):
        resolve(model_names(tied=True), OWN, user, STYLES)


def test_rules_and_plans_print_as_tables() -> None:
    assert "model.layers.*.mlp.w1" in str(PlanRules(OWN)) and "colwise" in str(PlanRules(OWN))
    assert "× 3" in str(resolve(model_names(), OWN, None, STYLES))
    assert "whole" in str(PlanRules())
