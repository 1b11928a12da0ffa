"""The command line: usage, failures, and what its verbs print."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from typer.testing import CliRunner

import plait
from plait.cli import chat, session
from plait.cli.app import app
from plait.errors import LayoutError, RankError
from tests.docs import tiny_hub

ARGUMENTS = ["--prompt", "Three ranks", "--max-new-tokens", "6"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_hub.smollm2(path)
    return path


def run(*arguments: object, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def said(result) -> str:
    """The output without the frames and line breaks of the message boxes."""
    return " ".join(result.output.replace("│", " ").split())


def plain_tokens(model_dir, **settings) -> list[int]:
    """What transformers generates in one process."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Three ranks"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=6, **settings)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "--model"),
        (["--model", "x"], "--prompt"),
        (["--model", "./nowhere", *ARGUMENTS], "a name on the hub such as"),
        (["--model", "nowhere.gguf", *ARGUMENTS], "there is no 'nowhere.gguf' here"),
        (["--model", "x", *ARGUMENTS, "--tp", "0"], "--tp"),
        (["--model", "x", *ARGUMENTS, "--dtype", "int3"], "float32, bfloat16"),
        (["--model", "x", *ARGUMENTS, "--device", "abacus"], "cpu, cuda"),
        (["--model", "x", *ARGUMENTS, "--top-p", "1.5"], "not in (0, 1]"),
        (["--model", "x", *ARGUMENTS, "--temperature", "0", "--top-k", "5"], "0 is greedy"),
        (["--model", "x", *ARGUMENTS, "--temperature", "-1"], "--temperature"),
        (["--model", "x", *ARGUMENTS, "--plan", "no-such.yaml"], "no-such.yaml"),
        (["--model", "x", *ARGUMENTS, "--temprature", "1"], "--temperature"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_hint(arguments, hint):
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert hint in said(result)
    assert "Traceback" not in result.output


def test_version_and_bare_command():
    assert run("--version").output == f"plait {plait.__version__}\n"
    assert "generate" in run().output


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; sys.argv = ['plait', *%r]\n"
        "from plait.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code % arguments], check=True, capture_output=True)


def test_one_process_prints_the_text_alone(model_dir):
    import transformers

    result = run("generate", "--model", model_dir, *ARGUMENTS)
    assert result.exit_code == 0, result.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    expected = tokenizer.decode(plain_tokens(model_dir, do_sample=False), skip_special_tokens=True)
    assert result.stdout.strip() == expected.strip()
    assert "6 tokens in" in result.stderr


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {"do_sample": False}),
        (
            ["--temperature", "0.5", "--top-k", "8"],
            {"do_sample": True, "temperature": 0.5, "top_k": 8},
        ),
        (["--top-p", "0.8"], {"do_sample": True, "top_p": 0.8}),
    ],
    ids=["greedy", "top-k", "top-p"],
)
def test_json_holds_tokens_text_and_costs(options, settings, model_dir):
    result = run("generate", "--model", model_dir, *ARGUMENTS, "--seed", "3", "--json", *options)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    torch.manual_seed(3)
    assert printed["tokens"] == plain_tokens(model_dir, **settings)
    assert set(printed) == {"tokens", "text", "ranks"}
    (costs,) = printed["ranks"]
    assert costs["rank"] == 0 and costs["held_fraction"] == 1.0
    assert costs["read_bytes"] == (model_dir / "model.safetensors").stat().st_size
    assert costs["peak_memory_bytes"] > 1e6 and costs["load_s"] > 0 and costs["generate_s"] > 0


def test_a_home_directory_that_the_shell_left(model_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(model_dir.parent))
    result = run("generate", f"--model=~/{model_dir.name}", *ARGUMENTS, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["tokens"] == plain_tokens(model_dir, do_sample=False)
    (costs,) = printed["ranks"]
    assert costs["read_bytes"] == (model_dir / "model.safetensors").stat().st_size
    result = run("generate", "--model=~/nowhere", *ARGUMENTS)
    assert result.exit_code == 2 and "there is no" in said(result)


def test_no_chat_takes_the_prompt_as_it_is(model_dir):
    outputs = {
        run("generate", "--model", model_dir, *ARGUMENTS, "--json", option).stdout
        for option in ("--chat-template", "--no-chat")
    }
    assert len(outputs) == 2


def test_a_failure_exits_with_1_and_no_traceback(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = run("generate", "--model", tmp_path, *ARGUMENTS)
    assert result.exit_code == 1
    assert result.stderr.startswith("plait: ") and "Traceback" not in result.output
    result = run("generate", "--model", tmp_path, *ARGUMENTS, "--debug")
    assert result.exit_code == 1 and "Traceback" in result.stderr


@pytest.mark.parametrize("content", ["- colwise", "a: 1", "a: [", "colwise"])
def test_a_plan_file_that_is_no_mapping(content, tmp_path, model_dir):
    file = tmp_path / "rules.yaml"
    file.write_text(content)
    result = run("generate", "--model", model_dir, *ARGUMENTS, "--plan", file)
    assert result.exit_code == 1
    assert "The plan file rules.yaml." in result.stderr and "Ways out" in result.stderr


def _turns(monkeypatch) -> list[list[str]]:
    """What the model is told each time, as `role: content`; it answers as always."""
    turns: list[list[str]] = []
    say = session.Session.say

    def recorded(self, messages, *rest):
        turns.append([f"{message['role']}: {message['content']}" for message in messages])
        return say(self, messages, *rest)

    monkeypatch.setattr(session.Session, "say", recorded)
    return turns


def test_chat_keeps_the_conversation(model_dir, monkeypatch):
    turns = _turns(monkeypatch)
    lines = "Hello\n\nAgain\n/new\nHello\n/quit\nnever\n"
    arguments = ["--model", model_dir, "--max-new-tokens", "5", "--system", "Be brief."]
    result = run("chat", *arguments, input=lines)
    assert result.exit_code == 0, result.output
    start = ["system: Be brief.", "user: Hello"]
    assert turns[0] == turns[2] == start
    answer = turns[1][2]
    assert turns[1] == [*start, answer, "user: Again"] and answer.startswith("assistant: ")
    assert result.stdout.startswith(answer.removeprefix("assistant: ").lstrip(" ") + "\n")


@pytest.mark.ranks(3)
def test_given_ranks_are_used(rank, world_size, model_dir, tmp_path):
    tokens = plain_tokens(model_dir, do_sample=False)
    result = run("generate", "--model", model_dir, *ARGUMENTS, "--tp", 3, "--json")
    assert result.exit_code == 0, result.output
    if rank != 0:
        assert result.stdout == ""
        return
    printed = json.loads(result.stdout)
    assert printed["tokens"] == tokens
    assert [costs["rank"] for costs in printed["ranks"]] == [0, 1, 2]
    for costs in printed["ranks"]:
        assert costs["held_fraction"] < 0.4
        assert 0 < costs["read_bytes"] < 0.45 * (model_dir / "model.safetensors").stat().st_size


@pytest.mark.ranks(3)
def test_a_plan_file_replaces_rules(rank, world_size, model_dir, tmp_path):
    rules = {f"model.layers.*.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")}
    file = tmp_path / f"rules-{rank}.yaml"
    file.write_text(yaml.safe_dump(rules))
    result = run("generate", "--model", model_dir, *ARGUMENTS, "--tp", 3, "--json", "--plan", file)
    assert result.exit_code == 0, result.output
    if rank == 0:
        assert json.loads(result.stdout)["ranks"][0]["held_fraction"] > 0.5


@pytest.mark.ranks(2)
def test_another_number_of_ranks_is_refused_with_the_arithmetic(rank, world_size, model_dir):
    result = run("generate", "--model", model_dir, *ARGUMENTS, "--tp", 3)
    assert result.exit_code == 1
    assert ("but WORLD_SIZE is 2" in result.stderr) == (rank == 0)


@pytest.mark.ranks(3)
def test_chat_on_given_ranks(rank, world_size, model_dir, monkeypatch):
    turns = _turns(monkeypatch)
    monkeypatch.setattr(chat, "_HEARTBEAT_S", 0.05)
    arguments = ["--model", model_dir, "--max-new-tokens", "5", "--tp", 3]
    # Only the first rank's input counts.
    result = run("chat", *arguments, input="Hello\nAgain\n" if rank == 0 else "Nobody\n")
    assert result.exit_code == 0, result.output
    assert [turn[-1] for turn in turns] == ["user: Hello", "user: Again"]
    assert bool(result.stdout) == (rank == 0)


def command(*arguments: object) -> subprocess.CompletedProcess:
    """A real `python -m plait`."""
    return subprocess.run(
        [sys.executable, "-m", "plait", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
def test_own_ranks_generate_what_one_process_does(model_dir):
    done = command("generate", "--model", model_dir, *ARGUMENTS, "--tp", 3, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == plain_tokens(model_dir, do_sample=False)
    assert done.stderr == ""


@pytest.mark.slow
def test_a_failure_of_own_ranks_is_told_once(model_dir, tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("model.layers.*.mlp.gate_projj: colwise")
    done = command("generate", "--model", model_dir, *ARGUMENTS, "--tp", 3, "--plan", file)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("plait: ")
    assert done.stderr.count("gate_projj") == 1 and "Ways out:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_cause_is_told_rather_than_its_echo():
    from dataclasses import dataclass
    from typing import Any

    from plait.cli import ranks

    @dataclass
    class Failed:
        message: Any
        timestamp: int
        exitcode: int = 1

        def signal_name(self):
            return "SIGKILL"

    @dataclass
    class Child:
        failures: dict

    def left(error, timestamp=5):
        return Failed({"message": f"{type(error).__name__}: {error}"}, timestamp)

    echo, cause = RankError("waiting for all", "rank 1 failed", rank=1), LayoutError("2 × 3")
    assert str(ranks._first_failure(Child({0: left(echo, 4), 1: left(cause)}))) == "2 × 3"
    assert str(ranks._first_failure(Child({0: left(echo)}))) == str(echo)
    assert str(ranks._first_failure(Child({0: left(OSError("disk"))}))) == "OSError: disk"
    killed = ranks._first_failure(Child({2: Failed("Signal 9", 1, exitcode=-9)}))
    assert "rank 2 was ended by SIGKILL" in str(killed)


def test_chat_without_a_template_keeps_the_conversation(model_dir, monkeypatch):
    from plait.hf.generation import text

    told: list[str] = []
    monkeypatch.setattr(text, "has_template", lambda tokenizer: False)
    generated = text.generated

    def recorded(model, inputs, *rest):
        tokenizer = text.load_tokenizer(str(model_dir))
        told.append(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True))
        return generated(model, inputs, *rest)

    monkeypatch.setattr(text, "generated", recorded)
    lines = "Hello\nAgain\n"
    result = run("chat", "--model", model_dir, "--max-new-tokens", "3", input=lines)
    assert result.exit_code == 0, result.output
    assert told[0] == "Hello"
    assert told[1].startswith("Hello\n") and told[1].endswith("\nAgain")


def test_half_of_a_launchers_environment_is_one_clear_error(model_dir, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    done = run("generate", "--model", model_dir, *ARGUMENTS)
    assert done.exit_code == 1
    assert done.stderr.count("WORLD_SIZE is not set") == 1 and "Traceback" not in done.output


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_quietly(model_dir):
    chat_with_two = [sys.executable, "-m", "plait", "chat", "--model", str(model_dir), "--tp", "2"]
    process = subprocess.Popen(
        [*chat_with_two, "--max-new-tokens", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to all processes of the terminal's group
    )
    process.stdin.write("Hello\n")
    process.stdin.flush()
    process.stdout.readline()  # the model has answered
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
