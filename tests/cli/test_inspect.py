"""`plait inspect`: the table, the JSON, the pictures, and its exit codes."""

import html.parser
import json
import re

import pytest
from typer.testing import CliRunner

from plait.cli import inspect_html, inspect_text
from plait.cli.app import app
from plait.plan.explain import Explanation
from plait.plan.explain_parts import Param, Part


def run(*arguments: object):
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


def said(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """SmolLM2's heads and a small everything else; a config and no weights."""
    import transformers

    path = tmp_path_factory.mktemp("configs")
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=72,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=100,
    ).save_pretrained(path)
    return path


def test_the_table_says_what_is_split_and_how(config) -> None:
    result = run(config, "--tp", 2)
    text = said(result)
    assert result.exit_code == 0, result.output
    assert "model.layers.*.self_attn.q_proj (× 3)" in text
    assert "72×72 -> 40×72 | 32×72" in text, "uneven heads show each rank's shape"
    assert "7 norms" in text and "small, and works on whole tensors" in text
    assert re.search(r"9 query 0-4 5-8 3 key/value 0-1 1-2", text)
    assert "key/value head 1 is used by several ranks" in text
    assert "rank 1 computes 2 heads twice" in text
    assert "forward: 6 all-gathers" in text and "6 reduce-scatters" in text


def test_the_config_file_itself_and_another_dtype(config) -> None:
    small, large = (
        json.loads(run(config / "config.json", "--json", "--dtype", dtype).stdout)
        for dtype in ("bfloat16", "float32")
    )
    assert large["bytes"] == 2 * small["bytes"]


def test_json_adds_up(config) -> None:
    result = run(config, "--tp", 3, "--json", "--batch", 2, "--seq", 16)
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["num_ranks"] == 3 and found["dtype"] == "bfloat16"
    for rank in range(3):
        by_kind = sum(kind["bytes_per_rank"][rank] for kind in found["by_kind"].values())
        rows = sum(r["bytes_per_rank"][rank] for r in found["split"] + found["whole"])
        assert by_kind == rows == found["bytes_per_rank"][rank]
    assert found["heads"][0]["query"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    forward = found["collectives"]["forward"]
    # One for the embedding, two for each of three layers; 2 × 16 tokens of 72 features.
    # The loss adds a maximum, and two sums, in float32 for each token.
    size = 7 * 2 * 16 * 72 * 2 + 3 * 2 * 16 * 4
    assert forward["all_reduce"] == {"calls": 9, "bytes": size}
    per_layer = [b for b in found["blocks"] if b["layers"] == [0, 1, 2]]
    assert len(per_layer) == 1 and len(per_layer[0]["collectives_per_layer"]) == 4


def test_rules_of_the_users_and_a_refused_plan(config, tmp_path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "model.layers.*.mlp.up_proj: colwise\nmodel.layers.*.mlp.gate_proj: colwise\n"
        "model.layers.*.mlp.down_proj: rowwise\n"
        "model.layers.*.self_attn.q_proj: replicate\nmodel.layers.*.self_attn.k_proj: replicate\n"
        "model.layers.*.self_attn.v_proj: replicate\nmodel.layers.*.self_attn.o_proj: replicate\n"
    )
    found = json.loads(run(config, "--tp-plan", rules, "--json").stdout)
    assert found["heads"] == []
    whole = {row["pattern"]: row["why_whole"] for row in found["whole"]}
    assert whole["model.layers.*.self_attn.q_proj"] == "a rule says replicate"
    rules.write_text("model.layers.*.mlp.upp_proj: colwise\n")
    refused = run(config, "--tp-plan", rules)
    assert refused.exit_code == 2
    assert "matches no module" in said(refused) and "up_proj" in said(refused)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "MODEL"),
        (["./nowhere"], "there is no './nowhere' here"),
        (["x", "--tp", "1"], "--tp"),
        (["x", "--dtype", "int3"], "float32"),
        (["x", "--seq", "0"], "--seq"),
        (["x", "--html", "no/such/folder.html"], "there is no directory 'no/such'"),
        (["x", "--tp-plan", "no-such.yaml"], "there is no file 'no-such.yaml'"),
    ],
)
def test_wrong_usage(arguments, hint) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert hint in said(result)


def test_more_ranks_than_heads_is_refused(config) -> None:
    result = run(config, "--tp", 10)
    assert result.exit_code == 2
    assert "10 ranks for 9 query heads" in said(result)


class _Tags(html.parser.HTMLParser):
    """Checks that tags close in order, and keeps what they refer to."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.tips = 0

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in self.void:
            self.open.append(tag)
        self.refers += [value for key, value in attrs if key in ("src", "href")]
        self.tips += any(key == "data-tip" for key, _ in attrs)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(config, tmp_path) -> None:
    file = tmp_path / "plan.html"
    assert run(config, "--tp", 3, "--html", file).exit_code == 0
    text = file.read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert tags.open == [] and tags.refers == [] and tags.tips > 20
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert all(f">rank {rank}<" in text for rank in range(3))


def test_names_are_escaped() -> None:
    bad = "<script>alert('x')</script>"
    param = Param(f'w"{bad}', (4, 2), ((2, 2), (2, 2)), 4)
    part = Part(f"layers.0.{bad}", bad, "other", bad, bad, (param,))
    page = inspect_html.page(Explanation(bad, 2, bad, (part,), (), (), (bad,), (1, 8)))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []


def test_the_picture(config, tmp_path) -> None:
    file = tmp_path / "plan.png"
    assert run(config, "--tp", 2, "--png", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    unknown = run(config, "--png", tmp_path / "plan.docx")
    assert unknown.exit_code == 2 and "docx" in said(unknown)


def test_an_unpredictable_forward_is_said_to_be_one(config, tmp_path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("model.layers.*.mlp: split_statistics\n")
    result = run(config, "--tp-plan", rules)
    assert result.exit_code == 0, result.output
    assert "not predicted: collectives" in said(result) and "split_statistics" in said(result)


def test_words() -> None:
    assert [inspect_text.size(n) for n in (0, 999, 1000, 5_990_000, 1.5e12)] == [
        "0 B", "999 B", "1 kB", "5.99 MB", "1.5 TB"
    ]  # fmt: skip
    assert inspect_text.by_rank(["a"] * 8) == "a"
    assert inspect_text.by_rank(["a"] * 5 + ["b"] * 3) == "a on 5, b on 3"
