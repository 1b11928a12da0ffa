"""Adapters of PEFT on a split model are those of one process: values, gradients, files."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait import comm
from plait.proof.numbers import exact
from plait.state import state_of
from plait.testing import add_noise, mutation, tiny

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ENDS = ["embed_tokens", "lm_head"]

SMALL = {"hidden_size": 36, "intermediate_size": 45, "num_hidden_layers": 2, "vocab_size": 97}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama",
        {**SMALL, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4},
        {"target_modules": [*ALL, *ENDS]},
    ),
    "tied": (
        "llama",
        {**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"target_modules": [*ALL, *ENDS], "use_rslora": True},
    ),
    "biased": (
        "qwen2",
        {},
        {"target_modules": ATTENTION[:3], "lora_bias": True, "rank_pattern": {"k_proj": 2}},
    ),
    "phi3": (
        "phi3",
        {},
        {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", *ENDS]},
    ),
    "mixtral": (
        "mixtral",
        {},
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}
"""Name → (tiny model, its config, LoRA's): untied with heads and widths that do not divide; tied;
biases; fused weights; experts."""

LAYOUTS = {
    2: [{"tp_size": 2}, {"dp_shard_size": 2}],
    3: [{"tp_size": 3}, {"dp_shard_size": 3}],
    4: [
        {"tp_size": 2, "dp_shard_size": 2},
        {"tp_size": 2, "dp_replicate_size": 2},
        {"tp_size": 4},
    ],
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(
    name: str, layout: dict[str, Any], dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[Any, Any]:
    """The same adapters around a split model and around a whole one; noise on every factor."""
    kind, config, lora = MODELS[name]
    made = mixtral() if kind == "mixtral" else tiny.model(kind, dtype=dtype, **config)
    whole = add_noise(made).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(**layout))
    return adapted(split, whole, {**lora, **more})


def mixtral() -> Any:
    from transformers import MixtralConfig

    config = MixtralConfig(
        **SMALL,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=6,
        num_local_experts=6,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return tiny.from_config(config)


def adapted(split: Any, whole: Any, lora: dict[str, Any]) -> tuple[Any, Any]:
    options = {"r": 4, "task_type": "CAUSAL_LM", **lora}
    torch.manual_seed(5)
    around_whole = peft.get_peft_model(
        whole, peft.LoraConfig(**copy.deepcopy(options)), autocast_adapter_dtype=False
    )
    torch.manual_seed(5 + dist.get_rank())  # the first rank's values count
    around_split = peft.get_peft_model(
        split, peft.LoraConfig(**copy.deepcopy(options)), autocast_adapter_dtype=False
    )
    same_weights(around_split, around_whole)
    noise = seeded(9)
    state = {
        key: param.detach() + 0.1 * torch.randn(param.shape, generator=noise).to(param.dtype)
        for key, param in around_whole.named_parameters()
        if param.requires_grad
    }
    around_whole.load_state_dict(state, strict=False)
    around_split.load_state_dict(state, strict=False)
    return around_split, around_whole


def same_weights(split: Any, whole: Any, tolerance: float = 0.0) -> None:
    found, expected = plait.full_state_dict(split), whole.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        limit = tolerance * max(value.abs().max().item(), 1e-3)
        assert (found[key] - value).abs().max() <= limit, key


def tokens(seed: int, size: int = 4, length: int = 13) -> torch.Tensor:
    return torch.randint(1, 90, (size, length), generator=seeded(seed))


def own_part(model: Any, ids: torch.Tensor) -> torch.Tensor:
    state = state_of(model)
    if state is None or state.data_mesh is None:
        return ids
    return ids.tensor_split(state.num_data_ranks)[state.data_mesh.get_local_rank()]


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(
    split: Any, whole: Any, steps: int = 3, tolerance: float = 1e-10, exactly: bool = True
) -> None:
    """AdamW on unequal batches: loss, every gradient, norm and all weights as in one process."""
    ours = torch.optim.AdamW(trained(split), lr=1e-2)
    theirs = torch.optim.AdamW(trained(whole), lr=1e-2)
    for step in range(steps):
        ids = tokens(step, size=step % 3 + 3)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=seeded(step)) < 0.4, -100)
        with exact() if exactly else contextlib.nullcontext():
            mine = split(input_ids=own_part(split, ids), labels=own_part(split, labels)).loss
            expected = whole(input_ids=ids, labels=labels).loss
            mine.backward()
            expected.backward()
        assert abs(mine.item() - expected.item()) <= tolerance, step
        grads = plait.full_grads(split)
        wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        assert grads.keys() == wanted.keys() and len(wanted) > 3
        for key, grad in wanted.items():
            limit = tolerance * max(grad.abs().max().item(), 1e-6)
            assert (grads[key] - grad).abs().max() <= limit, (step, key)
        norm: Any = nn.utils.clip_grad_norm_(trained(split), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        wanted_norm = nn.utils.clip_grad_norm_(trained(whole), 0.5)
        assert abs(float(norm) - float(wanted_norm)) <= tolerance * float(wanted_norm)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_weights(split, whole, tolerance)


def same_logits(split: Any, whole: Any, tolerance: float = 1e-11) -> None:
    ids = tokens(20, size=3, length=7)
    with torch.no_grad(), exact():
        found, expected = split(input_ids=ids).logits, whole(input_ids=ids).logits
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def merge_and_unload(split: Any, whole: Any) -> None:
    split.eval(), whole.eval()
    same_logits(split, whole)
    with split.disable_adapter(), whole.disable_adapter():
        same_logits(split, whole)
    split.merge_adapter(), whole.merge_adapter()
    same_logits(split, whole)
    same_weights(split, whole, 1e-11)
    split.unmerge_adapter(), whole.unmerge_adapter()
    same_logits(split, whole)
    merged, expected = split.merge_and_unload(), whole.merge_and_unload()
    same_logits(merged, expected)
    same_weights(merged, expected, 1e-11)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MODELS)
def test_lora_trains_and_merges_as_in_one_process(name: str) -> None:
    for layout in LAYOUTS[dist.get_world_size()]:
        if name in ("biased", "tied") and "dp_shard_size" in layout:
            continue
        split, whole = pair(name, layout)
        train(split, whole)
        if name != "tied":  # PEFT unties the whole model's weights when it merges them
            merge_and_unload(split, whole)


@pytest.mark.wide_ranks(4)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_dora(name: str) -> None:
    split, whole = pair(name, LAYOUTS[dist.get_world_size()][0], use_dora=True)
    train(split, whole)
    merge_and_unload(split, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("start", ["olora", "orthogonal", "gaussian"])
def test_initial_values_made_of_the_weight(start: str) -> None:
    split, whole = pair_of_float32(init_lora_weights=start)
    train(split, whole, steps=1, tolerance=5e-4, exactly=False)


def pair_of_float32(**lora: Any) -> tuple[Any, Any]:
    whole = add_noise(tiny.model("llama", dtype=torch.float32)).train()
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(tp_size=2))
    return adapted(split, whole, {"target_modules": ALL, **lora})


@pytest.mark.ranks(2, 4)
def test_copies_of_modules_are_trained() -> None:
    split, whole = pair("llama", LAYOUTS[dist.get_world_size()][0], target_modules=ALL,
                        modules_to_save=["lm_head", "embed_tokens"])  # fmt: skip
    train(split, whole)
    merge_and_unload(split, whole)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("recompute", [None, False, True])
def test_sequence_parallel_and_recomputed(recompute: bool | None) -> None:
    layout = {"tp_size": dist.get_world_size(), "enable_sequence_parallel": True}
    split, whole = pair("llama", layout)
    if recompute is not None:
        for model in (split, whole):
            options = {"use_reentrant": recompute}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
    # What is computed again in the backward is outside of `exact`.
    train(split, whole, tolerance=1e-10 if recompute is None else 1e-5, exactly=recompute is None)


@pytest.mark.wide_ranks(4)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("around", [True, False])
def test_adapters_that_were_there_before_the_split(around: bool) -> None:
    whole: Any = add_noise(tiny.model("llama", **MODELS["llama"][1])).train()
    options: Any = {"target_modules": [*ALL, "embed_tokens"], "init_lora_weights": False}
    if around:
        config = peft.LoraConfig(modules_to_save=["lm_head"], task_type="CAUSAL_LM", **options)
        whole = peft.get_peft_model(whole, config, autocast_adapter_dtype=False)
    else:
        whole.add_adapter(peft.LoraConfig(**options))
    split = copy.deepcopy(whole)
    same = plait.parallelize(split, plait.DistributedConfig(**LAYOUTS[dist.get_world_size()][0]))
    assert same is split
    same_weights(split, whole)
    train(split, whole)
    if around:
        merge_and_unload(split, whole)


@pytest.mark.ranks(2)
def test_bfloat16() -> None:
    split, whole = pair("llama", {"tp_size": 2}, torch.bfloat16)
    same_logits(split, whole, 5e-2)
    ids = tokens(3)
    for model in (split, whole):
        model(input_ids=ids, labels=ids).loss.backward()
    grads = plait.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            limit = 8e-2 * param.grad.abs().max()
            assert (grads[key] - param.grad).abs().max() <= limit, key


@pytest.mark.ranks(4)
def test_two_groups_and_replicated_factors_are_equal_bit_by_bit() -> None:
    split, whole = pair("llama", {"tp_size": 2, "dp_replicate_size": 2})
    second, second_whole = pair("phi3", {"tp_size": 2, "dp_shard_size": 2})
    train(split, whole)
    train(second, second_whole)
    for model in (split, second):
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            mine: Any = param
            for axis, placement in enumerate(mine.placements):
                if placement.is_replicate():
                    mesh = mine.device_mesh[mine.device_mesh.mesh_dim_names[axis]]
                    first = comm.broadcast(mine._local_tensor.contiguous(), mesh)
                    assert torch.equal(first, mine._local_tensor), name


@pytest.mark.ranks(2)
def test_dropout_of_adapters() -> None:
    """Whole inputs lose the same elements on all ranks, split ones each rank's own."""
    split, _ = pair("llama", {"tp_size": 2}, lora_dropout=0.5)
    ids, state = tokens(3), state_of(split)
    assert state is not None
    torch.manual_seed(dist.get_rank())
    torch.manual_seed(7)
    loss = split(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.equal(comm.broadcast(loss.detach(), state.tp_mesh), loss.detach())
    for name, param in split.named_parameters():
        grad: Any = param.grad
        if grad is not None and grad.placements[-1].is_replicate():
            first = comm.broadcast(grad._local_tensor.contiguous(), state.tp_mesh)
            assert torch.equal(first, grad._local_tensor), name


@pytest.mark.ranks(2, 4)
def test_files_are_those_of_one_process(tmp_path: Path) -> None:
    world = dist.get_world_size()
    split, whole = pair("llama", LAYOUTS[world][0], modules_to_save=["lm_head"],
                        target_modules=[*ALL, "embed_tokens"])  # fmt: skip
    split.save_pretrained(tmp_path / "split")
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / "whole")
    dist.barrier()
    files = ["adapter_model.safetensors", "adapter_config.json"]
    for name in files:
        assert (tmp_path / "split" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    torch.manual_seed(3)
    base = tiny.model("llama", **MODELS["llama"][1])
    again, expected = copy.deepcopy(base), base
    plait.parallelize(again, plait.DistributedConfig(**LAYOUTS[world][0]))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "split", torch_device="cpu")
    expected = peft.PeftModel.from_pretrained(expected, tmp_path / "whole")
    again.eval(), expected.eval()
    same_logits(again, expected)
    for model in (again, expected):
        model.load_adapter(tmp_path / "whole", adapter_name="second", torch_device="cpu")
        model.set_adapter("second")
    same_logits(again, expected)
    ids = tokens(1, size=2, length=5)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(
        again.generate(input_ids=ids, **options), expected.generate(input_ids=ids, **options)
    )


@pytest.mark.ranks(2, 4)
def test_adapters_of_the_model_itself(tmp_path: Path) -> None:
    layout = LAYOUTS[dist.get_world_size()][0]
    whole = add_noise(tiny.model("llama", **MODELS["llama"][1]))
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(**layout))
    for model in (split, whole):
        torch.manual_seed(1)
        model.add_adapter(peft.LoraConfig(r=3, target_modules=ALL, init_lora_weights=False))
    same_logits(split, whole)
    split.save_pretrained(tmp_path / "split")
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / "whole")
    dist.barrier()
    name = "adapter_model.safetensors"
    assert (tmp_path / "split" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for model in (split, whole):
        model.load_adapter(str(tmp_path / "whole"), adapter_name="read")
        model.set_adapter("read")
    same_logits(split, whole)
    with pytest.raises(plait.PlaitError, match="there is an adapter 'read' already"):
        split.load_adapter(str(tmp_path / "whole"), adapter_name="read")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["prompt", "prefix", "p-tuning", "ia3", "ia3 of inputs"])
def test_prompts_prefixes_and_vectors(kind: str, tmp_path: Path) -> None:
    config: Any = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "p-tuning": peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
        ),
        "ia3": peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        "ia3 of inputs": peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "gate_proj", "o_proj", "up_proj"],
            feedforward_modules=["o_proj", "up_proj"],
        ),
    }[kind]
    whole = add_noise(tiny.model("llama", **MODELS["llama"][1]))
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(tp_size=dist.get_world_size()))
    torch.manual_seed(5)
    whole = peft.get_peft_model(whole, copy.deepcopy(config))
    torch.manual_seed(5 + dist.get_rank())
    split = peft.get_peft_model(split, config)
    ids = tokens(2, size=3)
    with exact():
        for model in (split, whole):
            model(input_ids=ids, labels=ids).loss.backward()
    grads = plait.full_grads(split)
    for name, param in whole.named_parameters():
        if param.grad is not None:
            limit = 1e-10 * param.grad.abs().max()
            assert (grads[name] - param.grad).abs().max() <= limit, name
    split.eval(), whole.eval()
    same_logits(split, whole)
    split.save_pretrained(tmp_path / "split")
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / "whole")
    dist.barrier()
    name = "adapter_model.safetensors"
    assert (tmp_path / "split" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.wide_ranks(4)
@pytest.mark.ranks(2, 4)
def test_with_accelerator_checkpoints_and_generate(tmp_path: Path) -> None:
    """An adapter trained for three steps, of which the last one after a resumption."""
    world = dist.get_world_size()
    layout = LAYOUTS[world][0]

    def steps(model: Any, numbers: tuple[int, ...], load: bool = False) -> list[float]:
        accelerator = plait.Accelerator(
            plait.DistributedConfig(**layout), gradient_accumulation_steps=2
        )
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        if load:
            accelerator.load_state(tmp_path)
        for number in numbers:
            for part in range(2):
                ids = own_part(model, tokens(2 * number + part))
                with accelerator.accumulate(model), exact():
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
                    accelerator.clip_grad_norm_(trained(model), 1.0)
                    losses.append(float(accelerator.window_loss()))
                    optimizer.step()
                    optimizer.zero_grad()
            if number == 1:
                accelerator.save_state(tmp_path, step=1)
        return losses

    first, _ = pair("llama", layout)
    again = copy.deepcopy(first) if "dp_shard_size" not in layout else pair("llama", layout)[0]
    unbroken = steps(first, (0, 1, 2))
    assert steps(again, (2,), load=True) == pytest.approx(unbroken[4:], abs=1e-12)
    same_weights(again, first_of(first), 1e-12)
    ids = tokens(5, size=2, length=4)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with plait.gathered(first):
        found = first.generate(input_ids=ids, **options)
    assert torch.equal(found, again.generate(input_ids=ids, **options))


def first_of(model: Any) -> Any:
    class Whole:
        @staticmethod
        def state_dict() -> dict[str, torch.Tensor]:
            return plait.full_state_dict(model)

    return Whole


@pytest.mark.ranks(2)
def test_mutations_are_noticed() -> None:
    from plait.hf.peft import layers
    from plait.styles.linear import ColwiseParallel

    def step() -> None:
        train(*pair("llama", {"tp_size": 2}), steps=1)

    step()
    with mutation.must_fail(layers, "sum_from", lambda x, mesh: x):
        step()  # each rank's rows of the embedding's factor alone
    own = layers.AlongFeatures.param_layout
    with mutation.must_fail(
        ColwiseParallel, "install_forward", lambda self, module, mesh: module, Exception
    ):
        step()  # factors without the border of their layer
    assert own is layers.AlongFeatures.param_layout


@pytest.mark.ranks(4)
def test_gradients_of_adapters_are_averaged_over_data_ranks() -> None:
    from plait.surgery import data_ranks

    def step() -> None:
        train(*pair("llama", {"tp_size": 2, "dp_shard_size": 2}), steps=1)

    with mutation.must_fail(data_ranks.Averaging, "_note", lambda self, param: None):
        step()


@pytest.mark.ranks(2)
def test_what_is_refused(tmp_path: Path) -> None:
    split, _ = pair("llama", {"tp_size": 2})
    (tmp_path / "file").write_text("")
    with pytest.raises(plait.PlaitError, match="it is a file"):
        split.save_pretrained(tmp_path / "file")
    with pytest.raises(plait.PlaitError, match="there is no adapter 'other'"):
        split.save_pretrained(tmp_path / "new", selected_adapters=["other"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(plait.PlaitError, match="combine them in one process"):
        split.add_weighted_adapter(["default"], [0.5], "half")
    whole = tiny.model("llama")
    plait.parallelize(whole, plait.DistributedConfig(tp_size=2))
    with pytest.raises(plait.PlaitError, match="Adapters of the kind"):
        peft.get_peft_model(whole, peft.LoHaConfig(target_modules=["q_proj"]))
    sharded = tiny.model("llama")
    plait.parallelize(sharded, plait.DistributedConfig(dp_shard_size=2))
    with pytest.raises(plait.PlaitError, match="sharded over data ranks"):
        peft.get_peft_model(
            sharded, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        )


@pytest.mark.ranks(2)
def test_another_model_is_as_ever() -> None:
    pair("llama", {"tp_size": 2})
    alone = tiny.model("llama")
    around = peft.get_peft_model(alone, peft.LoraConfig(r=4, target_modules=ALL))
    ids = tokens(1)
    around(input_ids=ids, labels=ids).loss.backward()
    assert all(type(p) is nn.Parameter for p in around.parameters())
    assert peft.get_peft_model_state_dict(around)
