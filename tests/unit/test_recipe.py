"""Recipes: what is refused, what wins, what is written; the course of the learning rate."""

import dataclasses

import pytest
import torch
import yaml
from torch import nn

from plait.errors import PlaitError
from plait.train import recipe as recipes
from plait.train import schedules
from plait.train.recipe import Recipe
from plait.train.recipe_fields import Optimizer

SMALL = {"model": "m", "data": {"train": "a.txt"}}


def test_what_is_written_is_what_is_read(tmp_path):
    made = Recipe.from_dict(
        {
            "model": "m",
            "output": "out",
            "data": {"train": ["a", "b"], "eval": 0.1, "fields": {"text": "body"}},
            "layout": {"tp": 2, "dp_shard": 3, "dp_replicate": 2, "tp_plan": {"a.*": "colwise"}},
            "train": {"steps": 7, "accumulate": 5, "batch_size": 4, "mixed_precision": False},
            "optimizer": {"lr": "1e-4", "betas": [0.9, 0.95]},
            "reports": {"trackers": "tensorboard"},
        }
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(made.to_yaml())
    assert Recipe.from_dict(recipes.read(file)) == made
    assert made.optimizer.lr == 1e-4 and made.train.mixed_precision == "no"
    assert made.layout.num_ranks == 12 and made.rows_per_step == 6 * 5 * 4


def test_defaults_pass_their_own_checks():
    for section in recipes.SECTIONS.values():
        for key in dataclasses.fields(section):
            value = getattr(section(), key.name)
            assert key.metadata["check"](value) == value, key.name
            assert key.metadata["meaning"]


def test_all_that_is_wrong_is_in_one_error_with_the_nearest_names():
    data = {
        "modle": "m",
        "lr": 1,
        "data": {"trian": "x", "seq_length": 1, "packing": "tight", "eval": 1.5},
        "layout": {"tp": True},
        "train": {"lr": 1, "epochs": 0, "dtype": "int8"},
        "optimizer": {"lr": "fast", "betas": [0.9, 1.0], "warmup": -1},
        "reports": [1],
    }
    with pytest.raises(PlaitError) as caught:
        Recipe.from_dict(data)
    text = str(caught.value)
    for piece in (
        "there is no key modle (nearest: model)",
        "there is no key lr (it is optimizer.lr)",
        "there is no key data.trian (nearest: train)",
        "data.seq_length must be a whole number of at least 2, got 1",
        "data.packing must be one of auto, cut, whole, none, got 'tight'",
        "data.eval must be a number above 0 and below 1, got 1.5",
        "layout.tp must be a whole number of at least 1, got True",
        "there is no key train.lr (it is optimizer.lr)",
        "train.epochs must be a number above 0, got 0",
        "train.dtype must be one of float32",
        "optimizer.lr must be a number of at least 0, got 'fast'",
        "optimizer.betas",
        "optimizer.warmup",
        "reports must be a block of keys",
        "no model is named",
        "no files to learn from are named: data.train",
    ):
        assert piece in text, piece


@pytest.mark.parametrize("data", [None, [], "text"])
def test_a_recipe_is_a_mapping(data):
    with pytest.raises(PlaitError, match="must be a mapping"):
        Recipe.from_dict(data)


@pytest.mark.parametrize(("content", "why"), [("a: [", "not YAML"), ("- a", "must be a mapping")])
def test_unreadable_recipes(content, why, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(content)
    with pytest.raises(PlaitError, match=why):
        recipes.read(file)
    with pytest.raises(PlaitError, match="cannot be read"):
        recipes.read(tmp_path / "none.yaml")


def test_settings_win_over_the_file():
    merged = recipes.merged(SMALL, {"output": "o", "data.eval": 0.5, "optimizer.lr": 2})
    made = Recipe.from_dict(merged)
    assert (made.output, made.data.train, made.data.eval) == ("o", ("a.txt",), 0.5)
    assert made.optimizer.lr == 2 and "eval" not in SMALL["data"]
    for wrong in ({"a.b.c": 1}, {"data": {}}):
        with pytest.raises(PlaitError, match="it is no key"):
            recipes.merged(SMALL, wrong)


def test_assignments():
    assert recipes.parse_assignment("data.fields={text: body}") == (
        "data.fields",
        {"text": "body"},
    )
    assert recipes.parse_assignment("train.steps=3") == ("train.steps", 3)
    for wrong, why in (("steps", "KEY=VALUE"), ("=3", "KEY=VALUE"), ("a=[", "not YAML")):
        with pytest.raises(PlaitError, match=why):
            recipes.parse_assignment(wrong)


def test_yaml_of_a_recipe_holds_every_key():
    data = yaml.safe_load(Recipe.from_dict(SMALL).to_yaml())
    for name, section in recipes.SECTIONS.items():
        assert list(data[name]) == [key.name for key in dataclasses.fields(section)]


# ---- schedules ----


def rates(steps: int, **settings: object) -> list[float]:
    """The learning rate of each step, as the optimizer has it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedules.scheduler(optimizer, Optimizer(**settings), steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_courses_of_the_learning_rate():
    assert rates(4, schedule="constant") == [1, 1, 1, 1]
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", warmup=2) == [0.5, 1, 1, 0.5]
    assert rates(4, schedule="linear", warmup=0.5) == [0.5, 1, 1, 0.5]
    assert rates(4, schedule="linear", final_lr=0.5) == [1, 0.875, 0.75, 0.625]
    cosine = rates(4, schedule="cosine")
    assert cosine == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert rates(2, schedule="constant", warmup=8) == [0.125, 0.25]


def test_cosine_is_torchs_own():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.1)
    expected = []
    for _ in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(9, schedule="cosine", final_lr=0.1) == pytest.approx(expected)


def test_only_matrices_decay():
    model = nn.ModuleDict({"linear": nn.Linear(2, 3), "norm": nn.LayerNorm(3)})
    model["linear"].weight.requires_grad_(True)
    decaying, others = schedules.groups(model, 0.1)
    assert decaying["params"] == [model["linear"].weight] and decaying["weight_decay"] == 0.1
    assert len(others["params"]) == 3 and others["weight_decay"] == 0.0
    model["linear"].weight.requires_grad_(False)
    (only,) = schedules.groups(model, 0.1)
    assert only["weight_decay"] == 0.0
