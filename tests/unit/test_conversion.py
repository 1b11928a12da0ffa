"""Checkpoints of transformers through the recipes equal what plain transformers loads."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.core_model_loading import WeightConverter

from plait.hf.conversion import convert, revert, saved_names
from plait.plan.intervals import even
from plait.weights import ModuleStore, load, open_checkpoint, save

SMALL = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
    "model_type": "clip_vision_model",
}
MODELS = {
    "llama": ("LlamaForCausalLM", SMALL),
    "mixtral": ("MixtralForCausalLM", SMALL | EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SMALL | EXPERTS | {"decoder_sparse_step": 1}),
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "phi3": ("Phi3ForCausalLM", SMALL),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 48, "n_embd": 24, "n_layer": 2, "n_head": 4}),
    "gemma3_text": ("Gemma3ForCausalLM", SMALL),
    "glm4": ("Glm4ForCausalLM", SMALL),
    "llava": (
        "LlavaForConditionalGeneration",
        {"text_config": SMALL | {"model_type": "llama"}, "vision_config": VISION},
    ),
}


def tiny(model_type):
    name, fields = MODELS[model_type]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(AutoConfig.for_model(model_type, **fields)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()  # so that no bias is zero and no norm is one
    return cls, model


def empty(cls, config):
    with torch.device("meta"):
        return cls(config)


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    cls, model = tiny(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return cls, path, request.param


def test_whole_state_equals_plain_transformers(saved):
    cls, path, _ = saved
    plain, info = cls.from_pretrained(path, output_loading_info=True)
    ours = empty(cls, plain.config)
    with open_checkpoint(path) as checkpoint:
        conversion = convert(ours, checkpoint)
        report = load(ours, checkpoint, conversion.recipes)
    assert set(conversion.missing) == set(info["missing_keys"]) == set()
    assert set(conversion.unexpected) == set(info["unexpected_keys"]) == set()
    assert report.missing == ()
    theirs = plain.state_dict()
    assert theirs.keys() == ours.state_dict().keys()
    for name, x in ours.state_dict().items():
        assert torch.equal(x, theirs[name]), name
    tied = len({p.data_ptr() for p in plain.parameters()})
    assert len({p.data_ptr() for p in ours.parameters()}) == tied


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("n", [2, 3])
def test_shards_equal_slices_of_plain_transformers(saved, n, dim):
    cls, path, _ = saved
    theirs = cls.from_pretrained(path).state_dict()
    read = 0
    for rank in range(n):
        with open_checkpoint(path) as checkpoint:
            model = empty(cls, AutoConfig.from_pretrained(path))
            recipes = convert(model, checkpoint).recipes
            for name, recipe in recipes.items():
                x = theirs[name]
                layout = even(x.shape, dim, n)
                piece = recipe.read(checkpoint, layout.dim, layout.pieces_of(rank))
                start = sum(layout.sizes[:rank])
                expected = x.narrow(dim, start, layout.sizes[rank])
                assert torch.equal(piece, expected), (name, rank)
            read += checkpoint.bytes_read
    with open_checkpoint(path) as checkpoint:
        tied = [r for name, r in recipes.items() if name in model.all_tied_weights_keys]
        twice = sum(checkpoint.nbytes(key) for recipe in tied for key in recipe.names())
        assert read == checkpoint.total_bytes + twice


def test_mutation_experts_in_another_order_are_seen(tmp_path):
    cls, model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    key = "model.layers.0.mlp.experts.down_proj"
    with open_checkpoint(tmp_path) as checkpoint:
        recipe = convert(empty(cls, model.config), checkpoint).recipes[key]
        assert len(recipe.inputs) == 3
        wrong = type(recipe)(recipe.dim, tuple(reversed(recipe.inputs)))
        assert torch.equal(recipe.read(checkpoint), model.state_dict()[key])
        assert not torch.equal(wrong.read(checkpoint), model.state_dict()[key])


def test_base_model_into_head_model_and_back(tmp_path):
    cls, model = tiny("llama")
    model.model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "head")
    with open_checkpoint(tmp_path / "base") as checkpoint:
        ours = empty(cls, model.config)
        conversion = convert(ours, checkpoint)
        load(ours, checkpoint, conversion.recipes)
        assert conversion.missing == ("lm_head.weight",)
        assert conversion.unexpected == ()
        assert torch.equal(ours.model.norm.weight, model.model.norm.weight)
    with open_checkpoint(tmp_path / "head") as checkpoint:
        base = empty(type(model.model), model.config)
        conversion = convert(base, checkpoint)
        load(base, checkpoint, conversion.recipes)
        assert conversion.missing == ()
        assert conversion.unexpected == ("lm_head.weight",)
        assert torch.equal(base.norm.weight, model.model.norm.weight)


def test_names_of_older_checkpoints_and_superfluous_tensors(tmp_path):
    cls, model = tiny("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    state["model.extra.weight"] = torch.ones(2)
    del state["model.norm.weight"]
    save_file(state, file, {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        conversion = convert(empty(cls, model.config), checkpoint)
    assert conversion.unexpected == ("model.extra.weight",)
    assert conversion.missing == ("model.norm.weight",)


def test_gamma_and_beta_of_old_norms(tmp_path):
    config = AutoConfig.for_model(
        "bert",
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=30,
    )
    model = transformers.BertModel(config)
    state = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x.contiguous()
        for name, x in model.state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    ours = empty(transformers.BertModel, config)
    with open_checkpoint(tmp_path) as checkpoint:
        conversion = convert(ours, checkpoint)
        load(ours, checkpoint, conversion.recipes)
    assert conversion.missing == conversion.unexpected == ()
    for name, x in model.state_dict().items():
        assert torch.equal(x, ours.state_dict()[name]), name


def test_key_mapping_of_the_caller(tmp_path):
    cls, model = tiny("llama")
    state = {f"wrapped.{name}": x for name, x in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        conversion = convert(empty(cls, model.config), checkpoint, {r"^wrapped\.": ""})
    assert conversion.missing == conversion.unexpected == ()


def test_tied_by_config_but_stored_with_another_value(tmp_path):
    cls, model = tiny("gemma3_text")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert convert(empty(cls, model.config), checkpoint).untied == ()
        assert checkpoint.bytes_read == 0
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert convert(empty(cls, model.config), checkpoint).untied == ("lm_head.weight",)


def stored(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_saving_writes_what_plain_transformers_writes(saved, tmp_path):
    cls, path, _ = saved
    ours = empty(cls, AutoConfig.from_pretrained(path))
    with open_checkpoint(path) as checkpoint:
        conversion = convert(ours, checkpoint)
        load(ours, checkpoint, conversion.recipes)
    store = ModuleStore(ours, names=saved_names(ours))
    recipes = revert(ours, store.keys(), store, conversion.transforms)
    save(store, recipes, tmp_path / "ours")
    theirs = cls.from_pretrained(path)
    theirs.save_pretrained(tmp_path / "theirs")
    expected, written = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(x, written[name]), name
    theirs.config.save_pretrained(tmp_path / "ours")
    again = cls.from_pretrained(tmp_path / "ours")
    for name, x in theirs.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name


def test_saving_a_model_that_came_from_no_file(tmp_path):
    cls, model = tiny("mixtral")
    model.save_pretrained(tmp_path / "theirs")
    store = ModuleStore(model, names=saved_names(model))
    recipes = revert(model, store.keys(), store)
    report = save(store, recipes, tmp_path / "ours", max_shard_size="20KB")
    assert len(report.files) > 2
    expected, written = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert written.keys() == expected.keys()
    assert "model.layers.1.block_sparse_moe.experts.2.w1.weight" in written
    for name, x in expected.items():
        assert torch.equal(x, written[name]), name
    model.config.save_pretrained(tmp_path / "ours")
    again = cls.from_pretrained(tmp_path / "ours")
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name


def test_ties_that_the_config_asks_for_but_the_model_has_not(tmp_path):
    _, model = tiny("gemma3_text")
    assert "lm_head.weight" not in saved_names(model)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert "lm_head.weight" in saved_names(model)


class Doubled:
    """An operation of a kind that plait does not know: it runs on whole tensors."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0].flip(1) * 2}


def test_an_unknown_operation_runs_whole(tmp_path):
    cls, model = tiny("llama")
    model.save_pretrained(tmp_path)
    tables = [WeightConverter("o_proj.weight", "o_proj.weight", [Doubled()])]
    with open_checkpoint(tmp_path) as checkpoint:
        recipes = convert(empty(cls, model.config), checkpoint, tables=tables).recipes
        recipe = recipes["model.layers.0.self_attn.o_proj.weight"]
        piece = recipe.read(checkpoint, 1, ((3, 5),))
    expected = (model.model.layers[0].self_attn.o_proj.weight.flip(1) * 2)[:, 3:5]
    assert torch.equal(piece, expected)
