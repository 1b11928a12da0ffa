"""`plait convert`: models become checkpoints and come back to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from typer.testing import CliRunner

import plait
from plait.checkpoint import load, manifest, save
from plait.cli.app import app
from plait.testing import add_noise, tiny
from tests.docs import tiny_hub

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "phi3": {},
    "gemma3_text": {},
    "llava": {},
    "mixtral": {},
}
MIXTRAL = {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "mixtral":
        config = transformers.MixtralConfig(**tiny.SIZES, **MIXTRAL)
        return add_noise(transformers.MixtralForCausalLM(config).to(dtype).eval())
    return add_noise(tiny.model({"tied": "llama"}.get(name, name), dtype=dtype, **MODELS[name]))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def ran(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def read(folder: Path, name: str) -> Any:
    auto = "AutoModelForImageTextToText" if name == "llava" else "AutoModelForCausalLM"
    return getattr(transformers, auto).from_pretrained(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and torch.equal(x, b[name]) for name, x in a.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "model")
    told = ran(tmp_path / "model", tmp_path / "run", "--step", 12)
    assert "step-00000012" in told and "tensors" in told
    fresh = model_of(name)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    assert load(tmp_path / "run", fresh).step == 12
    assert equal(fresh.state_dict(), model.state_dict())
    ran(tmp_path / "run", tmp_path / "back", "--max-shard-size", "200KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert equal(stored(tmp_path / "back"), stored(tmp_path / "model")), "names and layouts"
    assert equal(read(tmp_path / "back", name).state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_of_a_training(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tiny.batch("llama")).loss.backward()
    optimizer.step()
    save(tmp_path / "run", model, optimizer)
    ran(tmp_path / "run", tmp_path / "model")
    assert equal(read(tmp_path / "model", name).state_dict(), model.state_dict())


def test_dtype(tmp_path: Path) -> None:
    model = model_of("llama")
    save(tmp_path / "run", model)
    ran(tmp_path / "run", tmp_path / "half", "--dtype", "bfloat16")
    half = read(tmp_path / "half", "llama")
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(x, model.state_dict()[n].bfloat16()) for n, x in half.named_parameters())
    ran(tmp_path / "half", tmp_path / "run2", "--dtype", "float32")
    kinds = {x.dtype for x in manifest.read(tmp_path / "run2" / "step-00000000").tensors.values()}
    assert kinds == {torch.float32}


def test_tokenizer_and_configs_go_with_it(tmp_path: Path) -> None:
    tiny_hub.smollm2(tmp_path / "model")
    ran(tmp_path / "model", tmp_path / "run")
    ran(tmp_path / "run", tmp_path / "back")
    for folder in ("model", "back"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer("Three ranks")["input_ids"]
    model = read(tmp_path / "back", "llama")
    save(tmp_path / "run2", model, tokenizer=tokenizer)
    ran(tmp_path / "run2", tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("Three ranks") == tokenizer("Three ranks")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert (tmp_path / "again" / "generation_config.json").exists()


def said(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_refusals(tmp_path: Path) -> None:
    save(tmp_path / "run", model_of("llama"), step=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert "is not empty" in said(run(tmp_path / "run", tmp_path / "full"))
    assert (tmp_path / "full" / "x").read_text() == "x"
    ran(tmp_path / "run", tmp_path / "full", "--force")
    assert (tmp_path / "full" / "x").exists() and (tmp_path / "full" / "config.json").exists()
    assert "is a file" in said(run(tmp_path / "run", tmp_path / "full" / "x", "--force"))
    assert "there is no checkpoint of step 4" in said(
        run(tmp_path / "run", tmp_path / "a", "--step", 4)
    )
    assert "none of auto" in said(run(tmp_path / "run", tmp_path / "a", "--dtype", "int8"))
    assert "that is no size" in said(run(tmp_path / "run", tmp_path / "a", "--max-shard-size", "x"))
    assert "there is no" in said(run(tmp_path / "nowhere", tmp_path / "a"))
    assert "neither checkpoints" in said(run(tmp_path / "full" / "..", tmp_path / "a"))
    save(tmp_path / "plain", tiny.model("mlp"))
    assert "of a Mlp, for which it is not known" in said(run(tmp_path / "plain", tmp_path / "a"))
    file = tmp_path / "run" / "step-00000003" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "__0_0.distcp is damaged" in said(run(tmp_path / "run", tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model_of("llama").save_pretrained(tmp_path / "model")
    tensors = stored(tmp_path / "model")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight is in no file" in said(run(tmp_path / "model", tmp_path / "a"))
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").iterdir())


def test_plait_has_the_room() -> None:
    assert plait.checkpoint.save is save and "checkpoint" in plait.__all__


def test_a_run_of_plait_train_is_a_model_already(tmp_path: Path) -> None:
    model = model_of("llama")
    save(tmp_path / "run" / "checkpoints", model, step=3)
    model.save_pretrained(tmp_path / "run")
    result = run(tmp_path / "run", tmp_path / "new")
    assert result.exit_code != 0 and not (tmp_path / "new").exists()
    words = " ".join(result.output.split())
    assert "a model of transformers already" in words or "already" in str(result.exception)
    ran(tmp_path / "run" / "checkpoints", tmp_path / "new")
    assert (tmp_path / "new" / "config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_becomes_part_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model_of("llama", dtype).save_pretrained(tmp_path / "base")

    def around() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)

    torch.manual_seed(0)
    options = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(init_lora_weights=False, **options)
    peft.get_peft_model(around(), config).save_pretrained(tmp_path / "adapter")
    ran(tmp_path / "base", tmp_path / "merged", "--merge", tmp_path / "adapter")
    plainly = peft.PeftModel.from_pretrained(around(), tmp_path / "adapter").merge_and_unload()
    plainly.save_pretrained(tmp_path / "plainly")
    found, expected = stored(tmp_path / "merged"), stored(tmp_path / "plainly")
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[key], x) and found[key].dtype == dtype for key, x in expected.items()
    )
    assert run(tmp_path / "base", tmp_path / "no", "--merge", tmp_path / "base").exit_code != 0
    save(tmp_path / "run", model_of("llama"), step=1)
    refused = run(tmp_path / "run", tmp_path / "no", "--merge", tmp_path / "adapter")
    assert refused.exit_code != 0 and not (tmp_path / "no").exists()
