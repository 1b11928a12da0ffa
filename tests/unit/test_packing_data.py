"""Files into documents of tokens: every format, which tokens are learned, and what is refused."""

import json
import os
import sys

import datasets
import pytest

from plait.errors import PlaitError
from plait.train import packing, text, text_data
from plait.train.recipe_fields import Data
from tests.docs import tiny_hub

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
MARKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_hub.byte_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plait" / "tokens"


def write(folder, name, content):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str):
        content = "".join(json.dumps(record) + "\n" for record in content)
    file.write_text(content)
    return str(file)


def said(tokenizer, documents):
    """Each document as text: all of it, and what of it is learned."""
    pieces = [documents.piece(n, 0, 10**9) for n in range(len(documents))]
    return [(tokenizer.decode(ids), tokenizer.decode(x[x != -100])) for ids, x in pieces]


def prepared(tokenizer, *paths, **options):
    return said(tokenizer, text_data.prepare(paths, tokenizer, Data(train=paths, **options)))


def test_text_files_folders_and_patterns(tokenizer, tmp_path):
    write(tmp_path, "d/b.txt", "two")
    write(tmp_path, "d/deep/c.md", "three")
    write(tmp_path, "d/code.py", "not looked for in a folder")
    first = write(tmp_path, "a.unusual", "one")
    whole = prepared(tokenizer, first, str(tmp_path / "d"), str(tmp_path / "d/*.txt"))
    assert [x for x, _ in whole] == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert all(x == learned for x, learned in whole)
    assert [x for x, _ in prepared(tokenizer, str(tmp_path / "**/*.md"), end_token=False)] == [
        "three"
    ]


def test_text_units(tokenizer, tmp_path):
    file = write(tmp_path, "a.txt", "\n\none\nstill one\n\n\ntwo\n")
    lines = prepared(tokenizer, file, text_unit="line", end_token=False)
    assert [x for x, _ in lines] == ["one", "still one", "two"]
    paragraphs = prepared(tokenizer, file, text_unit="paragraph", end_token=False)
    assert [x for x, _ in paragraphs] == ["one\nstill one", "two"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "array.json", "parquet"])
def test_records(suffix, tokenizer, tmp_path):
    records = [
        {"text": "plain"},
        {"prompt": "Q?", "completion": " A"},
        {"messages": CHAT},
    ]
    file = str(tmp_path / f"a.{suffix}")
    if suffix == "parquet":
        names = ("text", "prompt", "completion", "messages")
        rows = [dict.fromkeys(names) | record for record in records]
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        write(tmp_path, f"a.{suffix}", json.dumps(records) if "array" in suffix else records)
    plain, answer, chat = prepared(tokenizer, file)
    assert plain == ("plain<|im_end|>",) * 2
    assert answer == ("Q? A<|im_end|>", " A<|im_end|>")
    assert chat[0] == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert chat[1] == "yo<|im_end|>no<|im_end|>"
    for both in prepared(tokenizer, file, learn="all"):
        assert both[0] == both[1]


def test_a_template_that_marks_answers_is_believed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", MARKING)
    file = write(tmp_path, "a.jsonl", [{"messages": CHAT}])
    assert prepared(tokenizer, file)[0][1] == "yo<|im_end|>no<|im_end|>"


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path, "a.jsonl", [{"messages": CHAT}])
    changing = "{{ messages | length }}" + tiny_hub.CHAT_TEMPLATE
    monkeypatch.setattr(tokenizer, "chat_template", changing)
    with pytest.raises(PlaitError, match=r"line 1: messages: .*data.learn: all"):
        prepared(tokenizer, file)
    assert prepared(tokenizer, file, learn="all")[0][1].startswith("4")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(PlaitError, match="line 1: messages: the tokenizer has no chat template"):
        prepared(tokenizer, file)


def test_other_names_of_fields(tokenizer, tmp_path):
    file = write(tmp_path, "a.jsonl", [{"body": "x", "id": 7}, {"q": "a", "completion": "b"}])
    found = prepared(tokenizer, file, fields={"text": "body", "prompt": "q"}, end_token=False)
    assert found == [("x", "x"), ("ab", "b")]


def test_errors_name_file_line_and_field(tokenizer, tmp_path):
    lines = ['{"txt": "x"}', '{"text": 3}', "", '{"text"', "[1]", '{"prompt": "x"}']
    lines += ['{"messages": [{"role": "me"}]}']
    file = write(tmp_path, "a.jsonl", "\n".join(lines))
    with pytest.raises(PlaitError) as caught:
        prepared(tokenizer, file)
    for line, why in (
        (1, "has none of the fields text; prompt and completion; messages. It has txt (nearest"),
        (2, "text must be a text, got int"),
        (4, "it is not JSON"),
        (5, "it must be an object, got list"),
        (6, "it has no field completion; it has prompt"),
        (7, "messages, turn 1: the role 'me' is none of system, user"),
    ):
        assert f"a.jsonl, line {line}: " in str(caught.value) and why in str(caught.value)
    many = write(tmp_path, "b.jsonl", "x\n" * 1000)
    with pytest.raises(PlaitError, match="there may be more"):
        prepared(tokenizer, many)


def test_files_that_cannot_be_used(tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlaitError) as caught:
        text.find([str(tmp_path / "none.txt"), str(tmp_path / "empty"), str(tmp_path / "*.x")])
    for why in ("there is no such file", "the folder has no file with", "no file fits the pattern"):
        assert why in str(caught.value)
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    with pytest.raises(PlaitError) as caught:
        prepared(tokenizer, str(tmp_path / "bytes.txt"), str(tmp_path / "a.parquet"))
    assert "it is not UTF-8 text (byte 2" in str(caught.value)
    assert "it is not a Parquet file" in str(caught.value)


def test_tokens_are_made_once(tokenizer, tmp_path, cache, monkeypatch):
    file = write(tmp_path, "a.txt", "one")
    prepared(tokenizer, file)
    before = {x: x.stat().st_mtime_ns for x in cache.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(text_data, "_write", None)  # would be called for tokens that are not there
        prepared(tokenizer, file)
        with pytest.raises(TypeError):
            prepared(tokenizer, file, end_token=False)
    write(tmp_path, "a.txt", "another")
    assert prepared(tokenizer, file)[0][0].startswith("another")
    assert before.items() <= {x: x.stat().st_mtime_ns for x in cache.iterdir()}.items()
    assert len(list(cache.iterdir())) == 2


def test_nothing_is_left_of_a_failure(tokenizer, tmp_path, cache):
    with pytest.raises(PlaitError):
        prepared(tokenizer, write(tmp_path, "a.jsonl", "x"))
    assert os.listdir(cache) == []


def test_without_datasets_the_error_says_what_to_install(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PlaitError, match=r"pip install 'plait\[train\]'"):
        prepared(tokenizer, write(tmp_path, "a.txt", "x"))


def test_a_share_for_evaluation(tokenizer, tmp_path):
    file = write(tmp_path, "a.txt", "".join(f"line {n}\n" for n in range(20)))
    options = {"train": (file,), "text_unit": "line"}
    found = text_data.split(Data(eval=0.25, **options), tokenizer, seed=1)
    assert len(found.evaluation_order) == 5
    assert sorted(found.train_order + found.evaluation_order) == list(range(20))
    assert found.train_order != sorted(found.train_order)
    again = text_data.split(Data(eval=0.25, **options), tokenizer, seed=1)
    assert again.train_order == found.train_order
    other = text_data.split(Data(eval=0.25, **options), tokenizer, seed=2)
    assert other.train_order != found.train_order
    calm = text_data.split(Data(shuffle=False, **options), tokenizer, seed=1)
    assert calm.train_order == list(range(20)) and calm.evaluation is None
    apart = text_data.split(Data(eval=(file,), **options), tokenizer, seed=1)
    assert len(apart.train_order) == 20 and apart.evaluation_order == list(range(20))


def test_too_few_documents(tokenizer, tmp_path):
    one, none = write(tmp_path, "a.txt", "x"), write(tmp_path, "b.txt", "")
    with pytest.raises(PlaitError, match=r"1 document\(s\) in all"):
        text_data.split(Data(train=(one,), eval=0.5), tokenizer, seed=0)
    with pytest.raises(PlaitError, match="the files hold no text"):
        text_data.split(Data(train=(none,)), tokenizer, seed=0)


def test_documents_fill_rows(tokenizer, tmp_path):
    records = [{"prompt": "Q" * n, "completion": "A" * (9 - n)} for n in range(1, 9)] * 300
    file = write(tmp_path, "a.jsonl", records)  # more documents than one chunk of Arrow has
    documents = text_data.prepare((file,), tokenizer, Data(train=(file,)))
    assert text_data.packing_of(Data(), documents) == "whole"
    rows = packing.Rows(documents, 21, "whole")
    assert len(rows) == 1200 and rows.num_tokens == 2400 * 10
    learned = tokenizer.decode(rows[1100]["labels"][rows[1100]["labels"] != -100])
    first, second = (records[document] for document, _, _ in rows.plan[1100])
    assert learned == f"{first['completion']}<|im_end|>{second['completion']}<|im_end|>"
