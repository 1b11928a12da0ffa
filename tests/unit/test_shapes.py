"""Checkpoint headers: what is read, and every way in which a file can be damaged."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from plait.errors import WeightsError
from plait.shapes import encode_header, find_files, layout_of, read_header
from plait.shapes.gguf import read_gguf_header

TENSORS = {"a": torch.ones(2, 3), "b.weight": torch.arange(4), "c": torch.zeros(0, 5)}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def rewrite(file, change):
    """The file with a changed header and the data as it was."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_layout_is_where_the_bytes_are(file):
    entries, metadata = read_header(file)
    assert metadata == {"format": "pt"}
    raw = file.read_bytes()
    assert entries["b.weight"].dtype == "I64"
    assert entries["a"].shape == (2, 3)
    assert raw[entries["a"].start : entries["a"].stop] == struct.pack("<6f", *[1] * 6)
    assert entries["c"].nbytes == 0
    assert layout_of(find_files(file.parent)) == entries


def test_written_headers_can_be_read(tmp_path):
    path = tmp_path / "x.safetensors"
    described = [("w", "BF16", (3, 2)), ("ü", "F8_E4M3", (5,)), ("s", "F32", ())]
    path.write_bytes(encode_header(described, {"format": "pt"}) + bytes(12 + 5 + 4))
    entries, metadata = read_header(path)
    assert [(k, e.dtype, e.shape) for k, e in entries.items()] == described
    assert metadata == {"format": "pt"}
    assert entries["w"].start % 8 == 0


def shift(header, name, by):
    header[name]["data_offsets"] = [x + by for x in header[name]["data_offsets"]]


DAMAGES = {
    "overlap": (lambda h: shift(h, "a", -4), "overlaps 'b.weight'|begin at"),
    "hole": (lambda h: shift(h, "a", 4), "leaves a hole after"),
    "bytes": (lambda h: h["a"].update(shape=[2, 4]), r"takes 32 bytes, but its range .* has 24"),
    "dtype": (lambda h: h["a"].update(dtype="F31"), "dtype 'F31'"),
    "dtype kind": (lambda h: h["a"].update(dtype=[1]), "dtype"),
    "negative": (lambda h: h["a"].update(shape=[-2, -3]), "shape"),
    "fraction": (lambda h: h["a"].update(shape=[2.0, 3]), "shape"),
    "offsets": (lambda h: h["a"].update(data_offsets=[0]), "lacks"),
    "entry": (lambda h: h.update(a=3), "lacks"),
    "metadata": (lambda h: h.update(__metadata__=3), "__metadata__"),
    "json": (lambda h: "{" + "]", "corrupt header"),
    "list": (lambda h: "[]", "not a JSON object"),
    "twice": (
        lambda h: '{"a": 1, "a": 2}',
        "'a' appears twice",
    ),
    "huge": (lambda h: h["a"].update(shape=[1 << 63, 0]), "shape"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_headers_name_the_file_and_the_reason(file, damage):
    change, message = DAMAGES[damage]
    rewrite(file, change)
    with pytest.raises(WeightsError, match=message) as error:
        read_header(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -30])
def test_truncated_files_name_both_byte_counts(file, keep):
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(WeightsError) as error:
        read_header(file)
    assert str(len(raw[:keep])) in str(error.value)


def test_a_file_that_goes_on_and_one_that_is_no_safetensors_file(file):
    raw = file.read_bytes()
    file.write_bytes(raw + b"xx")
    with pytest.raises(WeightsError, match=f"goes on to byte {len(raw) + 2}"):
        read_header(file)
    file.write_bytes(b"PK\x03\x04 a zip archive" * 9)
    with pytest.raises(WeightsError, match="no safetensors file"):
        read_header(file)
    with pytest.raises(WeightsError, match="No such file"):
        read_header(file.parent / "nothing.safetensors")


def sharded(path):
    path.mkdir(exist_ok=True)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({"a": TENSORS["a"]}, path / names[0])
    save_file({"b": TENSORS["b.weight"]}, path / names[1])
    index = {"weight_map": {"a": names[0], "b": names[1]}, "metadata": {"total_size": 1}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return names, index


def test_an_index_and_its_files(tmp_path):
    names, index = sharded(tmp_path)
    files = find_files(tmp_path)
    assert [file.name for file in files.files] == names
    assert find_files(tmp_path / "model.safetensors.index.json") == files
    assert {k: e.file.name for k, e in layout_of(files).items()} == index["weight_map"]
    listed = find_files([tmp_path / name for name in names])
    assert layout_of(listed).keys() == {"a", "b"}


def test_what_an_index_can_get_wrong(tmp_path):
    names, index = sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"

    def with_map(**changes):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))

    with_map(bb=names[1])
    with pytest.raises(WeightsError, match=r"places bb in .*00002-of-00002.*near: b\)"):
        layout_of(find_files(tmp_path))
    with_map(a=names[1], b=names[0])
    with pytest.raises(WeightsError, match=r"but model-00001-of-00002\.safetensors holds it"):
        layout_of(find_files(tmp_path))
    with_map(c="model-00003-of-00003.safetensors")
    with pytest.raises(WeightsError, match=r"00003-of-00003\.safetensors is named by the index"):
        find_files(tmp_path)
    with_map(c="../../etc/passwd")
    with pytest.raises(WeightsError, match="outside of its directory"):
        find_files(tmp_path)
    path.write_text("{}")
    with pytest.raises(WeightsError, match="weight_map"):
        find_files(tmp_path)
    with_map()
    save_file(TENSORS, tmp_path / names[1])
    with pytest.raises(WeightsError, match=f"a is in {names[0]} and in {names[1]}"):
        layout_of(find_files(tmp_path))


def test_what_was_looked_for_and_what_is_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"config\.json but no weights.*model\.safetensors"):
        find_files(tmp_path)
    with pytest.raises(WeightsError, match=r"near it: config\.json"):
        find_files(tmp_path / "confi.json")
    with pytest.raises(WeightsError, match=r"model\.fp16\.safetensors"):
        find_files(tmp_path, variant="fp16")
    with pytest.raises(WeightsError, match=r"\.json.*\.txt"):
        (tmp_path / "a.txt").write_text("")
        find_files([tmp_path / "a.txt", tmp_path / "config.json"])
    with pytest.raises(WeightsError, match="does not exist"):
        find_files([tmp_path / "x.safetensors"])
    with pytest.raises(WeightsError, match="no file was named"):
        find_files([])
    with pytest.raises(WeightsError, match="it does not exist"):
        find_files(tmp_path / "no" / "such")


TYPES = {0: ("F32", 1, 4), 8: ("Q8_0", 32, 34)}


def gguf_bytes(dims=(32, 2), kind=8, version=3, extra=b"", entries=()):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"GGUF" + struct.pack("<IQQ", version, 1, len(entries))
    for key, code, value in entries:
        body += text(key) + struct.pack("<I", code) + value
    body += text("w") + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    body += struct.pack("<IQ", kind, 0) + extra
    return body + bytes(-len(body) % 32)


def test_gguf_header(tmp_path):
    path = tmp_path / "m.gguf"
    strings = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 2) + b"yz"
    entries = [
        ("n", 4, struct.pack("<I", 7)),
        ("f", 6, struct.pack("<f", 0.5)),
        ("s", 8, struct.pack("<Q", 2) + b"hi"),
        ("tokens", 9, strings),
        ("list", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
        ("one", 9, struct.pack("<IQi", 5, 1, 4)),
    ]
    head = gguf_bytes(entries=entries)
    path.write_bytes(head + bytes(68))
    header = read_gguf_header(path, TYPES)
    assert header.metadata == {
        "n": 7, "f": 0.5, "s": "hi", "tokens": 2, "list": [1, 2, 3], "one": [4],
    }  # fmt: skip
    entry = header.tensors["w"]
    assert (entry.shape, entry.dtype, entry.start, entry.nbytes) == ((2, 32), "Q8_0", len(head), 68)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"GGML" + bytes(40), "begins with b'GGML'"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(kind=99), "ggml type 99"),
        (gguf_bytes(dims=(33, 2)), "blocks of 32"),
        (gguf_bytes() + bytes(60), r"truncated: the tensors end at byte \d+, the file at byte \d+"),
        (gguf_bytes()[:50], "byte 50"),
        (gguf_bytes(dims=(1,) * 9), "9 dimensions"),
        (gguf_bytes(entries=[("k", 77, b"")]), "truncated or corrupt"),
    ],
)
def test_damaged_gguf_headers(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        read_gguf_header(path, TYPES)
    assert str(path) in str(error.value)


def test_an_index_of_a_variant(tmp_path):
    save_file(TENSORS, tmp_path / "model.fp16-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.fp16.json"
    names = dict.fromkeys(TENSORS, "model.fp16-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    assert find_files(index) == find_files(tmp_path, variant="fp16")
