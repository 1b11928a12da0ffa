"""`--adapter` of the verbs that generate."""

import json
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.hf.peft.reading import check_adapter, with_adapter

peft = pytest.importorskip("peft")


def _model(hidden: int = 32):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=61,
        )
    ).eval()


def _saved(place: Path) -> Path:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(_model(), config).save_pretrained(place)
    return place


def test_gives_what_peft_gives(tmp_path):
    import torch

    place = _saved(tmp_path / "adapter")
    wanted = peft.PeftModel.from_pretrained(_model(), place).eval()
    model = _model()
    ids = torch.arange(12).reshape(2, 6)
    before = model(ids).logits
    with_adapter(model, str(place))
    assert torch.equal(model(ids).logits, wanted(ids).logits)
    assert not torch.equal(model(ids).logits, before)


def test_of_another_base(tmp_path):
    place = _saved(tmp_path / "adapter")
    with pytest.raises(PlaitError, match="does not fit"):
        with_adapter(_model(hidden=64), str(place))


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (None, False, "adapter_config.json"),
        ("{}", True, "names no peft_type"),
        ("{", True, "cannot be read"),
        (json.dumps({"peft_type": "PROMPT_TUNING"}), True, "PROMPT_TUNING"),
        (json.dumps({"peft_type": "LORA"}), False, "adapter_model.safetensors"),
    ],
)
def test_no_adapter(tmp_path, config, weights, words):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    if weights:
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(PlaitError, match=words):
        check_adapter(str(tmp_path))


def test_no_directory(tmp_path):
    with pytest.raises(PlaitError, match="no such directory"):
        check_adapter(str(tmp_path / "none"))


def test_of_layers_that_are_not_there(tmp_path):
    place, model = _saved(tmp_path / "adapter"), _model()
    del model.model.layers[1]
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(PlaitError, match=r"no layer model\.layers\.1"):
        with_adapter(model, str(place))
    assert [name for name, _ in model.named_parameters()] == before
