"""from_pretrained and from_config: every rank reads its slices, and the model is the plain one."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import plait
from plait.errors import LayoutError, PlanError
from plait.testing import add_noise, parity, tiny


def world() -> int:
    return torch.distributed.get_world_size()


def config(**kwargs: Any) -> plait.DistributedConfig:
    return plait.DistributedConfig(tp_size=world(), **kwargs)


def saved(name: str, path: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """A tiny model on disk, written by plain transformers on the first rank only."""
    if torch.distributed.get_rank() == 0:
        add_noise(tiny.model(name, dtype=dtype)).save_pretrained(path, **save)
    torch.distributed.barrier()
    return path


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "phi3", "cohere", "starcoder2", "mistral", "llava"]
)
def test_a_checkpoint_of_several_files(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "model", dtype=torch.float64, max_shard_size="50KB")
    kind = "AutoModelForImageTextToText" if name == "llava" else "AutoModelForCausalLM"
    torch.manual_seed(torch.distributed.get_rank())
    split = getattr(plait, kind).from_pretrained(path, distributed_config=config())
    whole = getattr(transformers, kind).from_pretrained(path)
    assert type(split) is type(whole)
    assert not split.training and split.tp_size == world() and split.supports_tp_plan
    assert "colwise" in str(split.tp_plan) and isinstance(split.tp_plan, dict)
    parity.compare(split, whole, tiny.batch(name))
    report = split._plait_report
    assert not report.missing and not report.unexpected
    assert report.bytes_read < report.total_bytes * (1 / world() + 0.1)
    buffers = dict(whole.named_buffers())
    for key, buffer in split.named_buffers():
        torch.testing.assert_close(buffer, buffers[key])
    assert split.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "auto", None])
def test_dtypes(dtype: Any, tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model", dtype=torch.bfloat16)
    split = plait.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, distributed_config=config()
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
    state = plait.full_state_dict(split)
    for key, tensor in whole.state_dict().items():
        assert state[key].dtype == tensor.dtype and torch.equal(state[key], tensor), key


@pytest.mark.ranks(2, 3)
def test_a_new_head_is_the_same_on_all_ranks_and_that_of_one_process(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    torch.manual_seed(7 + torch.distributed.get_rank())
    auto = plait.AutoModelForSequenceClassification
    split = auto.from_pretrained(path, num_labels=3, distributed_config=config())
    after = torch.rand(())
    torch.manual_seed(7)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    state = plait.full_state_dict(split)
    assert torch.equal(state["score.weight"], whole.state_dict()["score.weight"])
    if torch.distributed.get_rank() == 1:
        torch.manual_seed(8)
        assert after == torch.rand(()), "the other ranks keep their own random numbers"
    batch = {"input_ids": tiny.batch("llama", size=1)["input_ids"]}
    parity.compare(split, whole, batch)


@pytest.mark.ranks(2)
def test_base_model_from_a_checkpoint_with_a_head_and_back(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path / "model")
    batch = {"input_ids": tiny.batch("qwen3")["input_ids"]}
    split = plait.AutoModel.from_pretrained(path, distributed_config=config())
    whole = transformers.AutoModel.from_pretrained(path)
    parity.compare(split, whole, batch)
    assert split._plait_report.unexpected == ("lm_head.weight",)


@pytest.mark.ranks(2)
def test_arguments_of_transformers_are_kept(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model" / "inner")
    split = plait.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "model"),
        subfolder="inner",
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        rms_norm_eps=0.5,
        generation_config=transformers.GenerationConfig(max_new_tokens=3, eos_token_id=2),
        distributed_config=config(tp_plan="auto"),
    )
    assert split.config._attn_implementation == "eager"
    assert split.config.rms_norm_eps == 0.5
    assert split.generation_config.max_new_tokens == 3
    ids = tiny.batch("llama", size=1)["input_ids"]
    assert split.generate(ids, do_sample=False).shape[1] <= ids.shape[1] + 3


@pytest.mark.ranks(2)
def test_sizes_follow_from_a_plan_and_old_arguments_still_work(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    auto = plait.AutoModelForCausalLM
    split = auto.from_pretrained(
        path, distributed_config=plait.DistributedConfig(tp_plan={"lm_head": "replicate"})
    )
    assert split.tp_size == 2 and split.tp_plan["lm_head"] == "replicate"
    assert split.tp_plan["model.layers.*.mlp.up_proj"] == "colwise", "the other rules are kept"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = auto.from_pretrained(path, tp_plan="auto")
    assert old.tp_size == 2
    assert any("DistributedConfig" in str(w.message) for w in caught)
    with pytest.raises(LayoutError, match=r"tp_plan=…, distributed_config=….*\n.*given twice"):
        auto.from_pretrained(path, tp_plan="auto", distributed_config=config())


@pytest.mark.ranks(2, 3)
def test_from_config_gives_the_model_of_one_process() -> None:
    torch.manual_seed(5 + torch.distributed.get_rank())
    split = plait.AutoModelForCausalLM.from_config(
        tiny.config("qwen2"), dtype=torch.float64, distributed_config=config()
    )
    torch.manual_seed(5)
    whole = transformers.AutoModelForCausalLM.from_config(tiny.config("qwen2"), dtype=torch.float64)
    split.eval(), whole.eval()
    parity.compare(split, whole, tiny.batch("qwen2"))


@pytest.mark.ranks(4)
def test_a_mesh_of_the_callers(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    path = saved("llama", tmp_path / "model")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "replica"))
    split = plait.AutoModelForCausalLM.from_pretrained(path, device_mesh=mesh)
    assert split.tp_size == 2
    batch = tiny.batch("llama", seed=mesh.get_local_rank("replica"))
    parity.compare(split, transformers.AutoModelForCausalLM.from_pretrained(path), batch)


@pytest.mark.ranks(2)
def test_weights_that_are_tied_in_the_config_but_stored_apart(tmp_path: Path) -> None:
    path = tmp_path / "model"
    saved("llama", path)
    if torch.distributed.get_rank() == 0:
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    torch.distributed.barrier()
    split = plait.AutoModelForCausalLM.from_pretrained(path, distributed_config=config())
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    parity.compare(split, whole, tiny.batch("llama"))


def test_without_a_launcher_it_is_an_ordinary_model(tmp_path: Path) -> None:
    whole = tiny.model("llama", dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    same = plait.AutoModelForCausalLM.from_pretrained(
        tmp_path, distributed_config=plait.DistributedConfig(tp_size=2)
    )
    assert type(same) is type(whole) and plait.held_fraction(same) == 1.0
    assert all(type(param) is torch.nn.Parameter for param in same.parameters())
    assert "generate" not in vars(same)
    batch = tiny.batch("llama")
    torch.testing.assert_close(same(**batch).loss, whole(**batch).loss)
    assert plait.parallelize(whole) is whole


@pytest.mark.ranks(2)
def test_what_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    auto = plait.AutoModelForCausalLM
    with pytest.raises(
        LayoutError, match=r"device_map='auto', distributed_config=…\):\n.*both decide where"
    ):
        auto.from_pretrained(path, device_map="auto", distributed_config=config())
    with pytest.raises(LayoutError, match="tp 4 alone, but WORLD_SIZE is 2"):
        auto.from_pretrained(path, distributed_config=plait.DistributedConfig(tp_size=4))
    with pytest.raises(LayoutError, match=r"ep_size=2: expert parallelism is not built"):
        auto.from_pretrained(path, distributed_config=plait.DistributedConfig(ep_size=2))
    for weights in path.glob("*.safetensors"):  # names are refused without a weight file at hand
        if torch.distributed.get_rank() == 0:
            weights.rename(weights.with_suffix(".away"))
    torch.distributed.barrier()
    with pytest.raises(PlanError, match=r"layers\.\*\.mlp\.gate'.*layers\.\*\.mlp\.gate_proj"):
        auto.from_pretrained(
            path, distributed_config=config(tp_plan={"layers.*.mlp.gate": "colwise"})
        )
    with pytest.raises(PlanError, match="closest styles: colwise"):
        auto.from_pretrained(path, distributed_config=config(tp_plan={"lm_head": "colwse"}))


@pytest.mark.ranks(3)
def test_more_ranks_than_heads_are_refused_and_nothing_is_changed() -> None:
    model = tiny.model("llama", num_attention_heads=2, num_key_value_heads=1)
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(LayoutError, match="3 ranks for 2 query heads") as caught:
        plait.parallelize(model)
    assert "a smaller tp_size" in str(caught.value) and "'replicate'" in str(caught.value)
    assert before == {name: id(param) for name, param in model.named_parameters()}, "untouched"
    with pytest.raises(LayoutError, match="split already"):
        fine = tiny.model("llama")
        plait.parallelize(plait.parallelize(fine))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "llava"])
def test_a_saved_model_is_read_by_plain_transformers(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "model")
    kind = "AutoModelForImageTextToText" if name == "llava" else "AutoModelForCausalLM"
    split = getattr(plait, kind).from_pretrained(path, distributed_config=config())
    split.save_pretrained(tmp_path / "again", max_shard_size="60KB")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again")
    first = getattr(transformers, kind).from_pretrained(path).state_dict()
    assert first.keys() == again.state_dict().keys()
    assert all(torch.equal(first[key], value) for key, value in again.state_dict().items())
    first_config = transformers.AutoConfig.from_pretrained(path)
    assert again.config.to_diff_dict() == first_config.to_diff_dict()
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    stored = set(index["weight_map"])
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        assert stored == set(file.keys()), "the names are those of the file it came from"


@pytest.mark.ranks(2)
def test_saving_keeps_a_head_that_is_tied_in_name_only(tmp_path: Path) -> None:
    model = add_noise(tiny.model("gemma3_text", dtype=torch.float32))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    head = model.lm_head.weight.detach().clone()
    plait.parallelize(model).save_pretrained(tmp_path)
    again = plait.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config())
    assert torch.equal(plait.full_state_dict(again)["lm_head.weight"], head)
