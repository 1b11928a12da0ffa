"""Arguments of from_pretrained: each is honoured as transformers does, or refused by its name."""

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import plait
from plait.errors import PlaitError, RankError, WeightsError
from plait.hf import arguments
from plait.testing import add_noise, parity, tiny


def first() -> bool:
    return torch.distributed.get_rank() == 0


def saved(name: str, path: Path, **save: Any) -> Path:
    """A tiny model on disk, written by plain transformers on the first rank only."""
    if first():
        add_noise(tiny.model(name, dtype=torch.float32)).save_pretrained(path, **save)
    torch.distributed.barrier()
    return path


def split(path: Any, kind: str = "AutoModelForCausalLM", **kwargs: Any) -> Any:
    config = plait.DistributedConfig(tp_size=torch.distributed.get_world_size())
    return getattr(plait, kind).from_pretrained(path, distributed_config=config, **kwargs)


def load_files(path: Path) -> dict[str, torch.Tensor]:
    return {key: x for file in path.glob("*.safetensors") for key, x in load_file(file).items()}


def refusal(path: Any, **kwargs: Any) -> str:
    with pytest.raises(PlaitError) as caught:
        split(path, **kwargs)
    return str(caught.value)


def in_a_weight_file(address: int) -> bool:
    """Whether an address of this process lies in a mapped safetensors file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            return line.endswith(".safetensors")
    return False


def test_every_argument_of_transformers_is_decided():
    """A name that a new version of transformers adds must be put into one of the tables."""
    method = transformers.PreTrainedModel.from_pretrained
    named = set(inspect.signature(method).parameters)
    source = inspect.getsource(method)
    popped = {
        line.split('kwargs.pop("')[1].split('"')[0]
        for line in source.splitlines()
        if 'kwargs.pop("' in line and "_kwargs.pop" not in line
    }
    decided = {*arguments.HUB, *arguments.OBSOLETE, *arguments.REFUSED, *arguments._HONOURED}
    elsewhere = {"pretrained_model_name_or_path", "model_args", "kwargs", "tp_plan", "tp_size"}
    assert len(popped) > 20
    assert named | popped <= decided | elsewhere
    assert not set(arguments.REFUSED) & set(arguments._HONOURED)


@pytest.mark.ranks(2)
def test_arguments_that_a_split_model_cannot_honour(tmp_path: Path) -> None:
    nowhere = tmp_path / "nothing is here"  # so nothing has been read
    values = {
        "quantization_config": {"load_in_4bit": True},
        "load_in_8bit": True,
        "state_dict": {"a": torch.zeros(1)},
        "max_memory": {0: "1GB"},
        "offload_folder": "x",
        "offload_buffers": True,
        "adapter_kwargs": {"revision": "x"},
        "adapter_name": "mine",
        "use_kernels": True,
        "kernel_config": object(),
        "allow_all_kernels": True,
        "fusion_config": {"patch_embeddings": True},
        "weights_only": False,
        "tqdm_class": object,
    }
    assert values.keys() | {"device_map", "load_in_4bit"} == arguments.REFUSED.keys()
    for name, value in values.items():
        text = refusal(nowhere, **{name: value})
        assert f"  - {name}: {arguments.REFUSED[name][0]}" in text
        assert arguments.REFUSED[name][1] in text and "tp_size=1" in text
    for config in (None, tiny.config("llama")):
        text = refusal(nowhere, config=config, max_memory={0: 1}, quantization_config={"a": 1})
        assert "max_memory: " in text and "quantization_config: " in text
    text = refusal(nowhere, config=tiny.config("llama"), quantization_config=object())
    assert "splitting quantized weights" in text


@pytest.mark.ranks(2)
def test_defaults_of_what_is_refused_are_accepted(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    nothing = dict.fromkeys(arguments.REFUSED) | {
        "weights_only": True,
        "adapter_name": "default",
        "adapter_kwargs": {},
        "offload_buffers": False,
        "low_cpu_mem_usage": True,
        "from_tf": False,
    }
    model = split(path, **nothing)
    parity.compare(
        model, transformers.AutoModelForCausalLM.from_pretrained(path), tiny.batch("llama")
    )


@pytest.mark.ranks(2)
def test_unknown_names_are_refused_with_the_closest(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    if first():
        (path / "model.safetensors").rename(tmp_path / "away")  # refused before weights are read
    torch.distributed.barrier()
    text = refusal(path, rms_norm_epps=1.0, atn_implementation="eager", zzzz=1)
    assert "rms_norm_epps is no argument of from_pretrained and no field of LlamaConfig" in text
    assert "closest: rms_norm_eps" in text and "closest: attn_implementation" in text
    assert "zzzz is no argument" in text
    with pytest.raises(PlaitError, match=r"dtyp is no argument.*\(closest: dtype"):
        split(path, config=tiny.config("llama"), dtyp="auto")


@pytest.mark.ranks(2)
def test_a_config_that_was_given_is_the_callers_own(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    config = tiny.config("llama", num_labels=2)
    with pytest.raises(TypeError, match="num_labels"):  # what transformers says of it
        transformers.AutoModelForSequenceClassification.from_pretrained(
            path, config=config, num_labels=7
        )
    with pytest.raises(PlaitError, match="num_labels is a field of the config, which was given"):
        split(path, "AutoModelForSequenceClassification", config=config, num_labels=7)
    config.num_labels = 7
    before = config.to_dict()
    model = split(
        path, "AutoModelForSequenceClassification", config=config, attn_implementation="eager"
    )
    assert plait.full_state_dict(model)["score.weight"].shape == (7, 96)
    assert model.config is not config and model.config._attn_implementation == "eager"
    assert config.to_dict() == before, "the caller's config stays as it was"


@pytest.mark.ranks(2)
def test_what_only_the_class_takes(tmp_path: Path) -> None:
    """`add_pooling_layer` is no config field but an argument of BertModel."""
    if first():
        config = transformers.BertConfig(
            hidden_size=48,
            num_attention_heads=12,
            num_hidden_layers=1,
            intermediate_size=24,
            vocab_size=32,
            max_position_embeddings=16,
        )
        transformers.BertModel(config).save_pretrained(tmp_path)
    torch.distributed.barrier()
    plan = {
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    config = plait.DistributedConfig(tp_size=2, tp_plan=plan)
    model = plait.AutoModel.from_pretrained(
        tmp_path, add_pooling_layer=False, distributed_config=config
    )
    assert model.pooler is None


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_mismatched_sizes_and_the_loading_info(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "model")
    plain = transformers.AutoModelForCausalLM
    model, info = split(path, output_loading_info=True)
    assert info == plain.from_pretrained(path, output_loading_info=True)[1]
    assert not any(info.values())
    with pytest.raises((WeightsError, RankError), match=r"\(96, 96\) in the checkpoint, \(120, 96"):
        split(path, vocab_size=120)
    torch.manual_seed(3 + torch.distributed.get_rank())
    model, info = split(
        path, vocab_size=120, ignore_mismatched_sizes=True, output_loading_info=True
    )
    torch.manual_seed(3)
    whole, expected = plain.from_pretrained(
        path, vocab_size=120, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert info == expected and info["mismatched_keys"]
    state = plait.full_state_dict(model)
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    parity.compare(model, whole, tiny.batch(name))


@pytest.mark.ranks(2)
def test_missing_and_unexpected_in_the_loading_info(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    kind = "AutoModelForSequenceClassification"
    _, info = split(path, kind, num_labels=3, output_loading_info=True)
    _, expected = getattr(transformers, kind).from_pretrained(
        path, num_labels=3, output_loading_info=True
    )
    assert info == expected
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}


@pytest.mark.ranks(2)
def test_the_kind_of_weight_file(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    key = "model.norm.weight"
    if first():
        torch.save(
            {n: x + 1 if n == key else x for n, x in stored.items()}, path / "pytorch_model.bin"
        )
        shutil.copytree(path, tmp_path / "safe")
        (tmp_path / "safe" / "pytorch_model.bin").unlink()
        shutil.copytree(path, tmp_path / "bin")
        (tmp_path / "bin" / "model.safetensors").unlink()
    torch.distributed.barrier()
    for wanted, plus in ((None, 0), (True, 0), (False, 1)):
        for options in ({}, {"config": tiny.config("llama")}):
            model = split(path, use_safetensors=wanted, **options)
            assert torch.equal(plait.full_state_dict(model)[key], stored[key] + plus)
            plain = transformers.AutoModelForCausalLM.from_pretrained(path, use_safetensors=wanted)
            assert torch.equal(plain.state_dict()[key], stored[key] + plus)
    text = refusal(tmp_path / "safe", use_safetensors=False)
    assert "there is none of pytorch_model.bin, pytorch_model.bin.index.json" in text
    text = refusal(tmp_path / "bin", use_safetensors=True)
    assert "there is none of model.safetensors, model.safetensors.index.json" in text
    assert refusal(path, use_safetensors=True, variant="fp16").count(".fp16.") == 2


@pytest.mark.ranks(2)
def test_variants_mappings_and_files_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("llama", tmp_path / "model", variant="fp16", max_shard_size="60KB")
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, variant="fp16").state_dict()
    for options in ({}, {"use_safetensors": True}, {"disable_mmap": True}):
        state = plait.full_state_dict(split(path, variant="fp16", **options))
        assert all(torch.equal(state[key], value) for key, value in whole.items())
    monkeypatch.setattr("plait.weights.mapped._VIEW_BYTES", 1)  # smaller ones are always read
    for options, mapped in (({}, True), ({"disable_mmap": True}, False)):
        weight = split(path, variant="fp16", **options).model.norm.weight.to_local()
        assert in_a_weight_file(weight.data_ptr()) == mapped
    if first():
        stored = {key.replace(".norm.", ".nrm."): x for key, x in load_files(path).items()}
        save_file(stored, path / "model.safetensors", {"format": "pt"})
    torch.distributed.barrier()
    assert split(path)._plait_report.missing == ("model.norm.weight",)
    model, info = split(path, key_mapping={r"\.nrm\.": ".norm."}, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(
        plait.full_state_dict(model)["model.norm.weight"], whole["model.norm.weight"]
    )


@pytest.mark.ranks(2)
def test_dtypes_under_their_old_name(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    assert split(path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert split(path, dtype=None, torch_dtype="bfloat16").dtype == torch.bfloat16
    assert split(path, dtype="float16", torch_dtype="bfloat16").dtype == torch.float16


@pytest.mark.ranks(2)
def test_a_directory_with_an_adapter(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    if first():
        (path / "adapter_config.json").write_text("{}")
    torch.distributed.barrier()
    assert "it holds an adapter" in refusal(path)


@pytest.mark.ranks(2)
def test_generation_settings_of_old_and_of_the_caller(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    given = transformers.GenerationConfig(max_new_tokens=3)
    model = split(path, generation_config=given)
    assert model.generation_config.max_new_tokens == 3
    assert model.generation_config is not given
    if first():
        (path / "generation_config.json").unlink()
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace("{", '{"num_beams": 4,', 1))
    torch.distributed.barrier()
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert whole.generation_config.num_beams == 4
    assert split(path).generation_config.to_dict() == whole.generation_config.to_dict()


CODE = """
from transformers import LlamaForCausalLM

class TwiceForCausalLM(LlamaForCausalLM):
    def __init__(self, config, factor=2):
        super().__init__(config)
        self.factor = factor

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.factor
        return out
"""


@pytest.mark.ranks(2)
def test_code_that_comes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    path = saved("llama", tmp_path / "model")
    if first():
        text = (path / "config.json").read_text()
        entry = '{"auto_map": {"AutoModelForCausalLM": "modeling_twice.TwiceForCausalLM"},'
        (path / "config.json").write_text(text.replace("{", entry, 1))
        (path / "modeling_twice.py").write_text(CODE)
    torch.distributed.barrier()
    # Each rank has a cache of its own, so that none imports what another is writing.
    cache = tmp_path / f"modules {torch.distributed.get_rank()}"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    assert type(split(path)) is transformers.LlamaForCausalLM, "not trusted, and not needed"
    model = split(path, trust_remote_code=True, code_revision="main", factor=3)
    assert type(model).__name__ == "TwiceForCausalLM" and model.factor == 3
    ids = tiny.batch("llama")["input_ids"]
    logits = model(ids).logits
    expected = transformers.LlamaForCausalLM.from_pretrained(path)(ids).logits * 3
    torch.testing.assert_close(logits, expected)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_twice.py").read_text() == CODE
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True
    )
    assert type(again).__name__ == "TwiceForCausalLM"
    with pytest.raises(PlaitError, match="factr is no argument"):
        split(path, trust_remote_code=True, factr=3)


@pytest.mark.ranks(2)
def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.unit import test_gguf

    path = tmp_path / "tiny.gguf"
    if first():
        test_gguf.write(path, "llama")
    torch.distributed.barrier()
    model = split(tmp_path, gguf_file=path.name, rms_norm_eps=0.5, attn_implementation="eager")
    assert model.config.rms_norm_eps == 0.5
    assert model.config._attn_implementation == "eager"
    assert "attention_dropot is no argument" in refusal(path, attention_dropot=0.5)
    text = refusal(path, variant="fp16", key_mapping={"a": "b"}, use_safetensors=True)
    for name in ("variant", "key_mapping", "use_safetensors"):
        assert f"{name} has no meaning for a GGUF file" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_model_in_the_cache_of_the_hub(variant: str | None, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--tiny"
    path = saved("llama", repository / "snapshots" / ("0" * 40), max_shard_size="60KB")
    if first():
        torch.save(load_files(path), path / "pytorch_model.bin")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        tiny.model("llama").save_pretrained(path, variant="fp16", max_shard_size="60KB")
    torch.distributed.barrier()
    options = {"cache_dir": tmp_path, "local_files_only": True, "variant": variant}
    whole = transformers.AutoModelForCausalLM.from_pretrained("someone/tiny", **options)
    model = split("someone/tiny", **options)
    state = plait.full_state_dict(model)
    assert all(torch.equal(state[key], value) for key, value in whole.state_dict().items())
    assert model.config.name_or_path == whole.config.name_or_path
    if variant is None:
        model = split("someone/tiny", use_safetensors=False, **options)
        assert model._plait_report.num_files == 1, "the one file that torch.save wrote"
    with pytest.raises(PlaitError, match="Reading the config of 'someone/absent'"):
        split("someone/absent", **options)


@pytest.mark.ranks(2)
def test_by_name_by_position_and_not_at_all(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "model")
    assert split(path).tp_size == 2
    config = plait.DistributedConfig(tp_size=2)
    auto = plait.AutoModelForCausalLM
    model = auto.from_pretrained(pretrained_model_name_or_path=path, distributed_config=config)
    assert model.tp_size == 2
    with pytest.raises(PlaitError, match="1 more positional argument"):
        auto.from_pretrained(path, 3, distributed_config=config)
    with pytest.raises(PlaitError, match="there must be some"):
        auto.from_pretrained(None, distributed_config=config)


def test_one_process_takes_what_transformers_takes(tmp_path: Path) -> None:
    model = tiny.model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = plait.DistributedConfig(tp_size=1)
    auto = plait.AutoModelForCausalLM
    _, info = auto.from_pretrained(tmp_path, output_loading_info=True, distributed_config=config)
    assert not info["missing_keys"]
    with pytest.raises(TypeError, match="positional"):
        auto.from_pretrained(tmp_path, 3)  # what LlamaForCausalLM says


def test_auto_classes_have_the_attributes_of_transformers() -> None:
    class OwnConfig(transformers.LlamaConfig):
        model_type = "plait-own"

    class OwnModel(transformers.LlamaForCausalLM):
        config_class = OwnConfig

    auto, theirs = plait.AutoModelForCausalLM, transformers.AutoModelForCausalLM
    auto.register(OwnConfig, OwnModel)
    try:
        assert auto._model_mapping is theirs._model_mapping
        assert auto._model_mapping[OwnConfig] is OwnModel
        made = auto.from_config(OwnConfig(**tiny.SIZES))
        assert type(made) is OwnModel
        with pytest.raises(ValueError, match="config_class"):
            auto.register(OwnConfig, transformers.LlamaForCausalLM)
        auto.register(OwnConfig, OwnModel, exist_ok=True)
    finally:
        theirs._model_mapping._extra_content.pop(OwnConfig)
    with pytest.raises(AttributeError, match="no_such_thing"):
        auto.no_such_thing  # noqa: B018
    assert not hasattr(auto, "__wrapped__")
