"""The same promises on CUDA devices over NCCL; run where there are at least two."""

import copy

import pytest
import torch

from plait.testing import run_ranks

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}"),
]


def parity_on_devices(name: str) -> float:
    """Run one tiny model split and whole; returns the fraction of parameters held."""
    import plait
    from plait.run import process_group
    from plait.testing import add_noise, parity, tiny

    device = process_group.ensure("cuda")
    whole = add_noise(tiny.model(name, dtype=torch.float64)).to(device)
    split = copy.deepcopy(whole)
    plait.parallelize(split, plait.DistributedConfig(tp_size=torch.distributed.get_world_size()))
    batch = {key: x.to(device) for key, x in tiny.batch(name).items()}
    parity.compare(split, whole, batch)
    ids = batch["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(split.generate(ids, **options), whole.generate(ids, **options))
    assert all(param.device.type == "cuda" for param in split.parameters())
    return plait.held_fraction(split)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_outputs_gradients_and_tokens(name: str) -> None:
    for fraction in run_ranks(parity_on_devices, 2, name, backend=None, timeout=300):
        assert fraction < 0.6


def loaded_on_devices(path: str) -> bool:
    """Read a checkpoint onto this rank's device and save it again."""
    import plait

    config = plait.DistributedConfig(tp_size=2)
    model = plait.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    model.save_pretrained(f"{path}-again")
    return all(param.device.type == "cuda" for param in model.parameters())


def test_reading_and_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    from plait.testing import tiny

    path = str(tmp_path / "model")
    tiny.model("llama", dtype=torch.bfloat16).save_pretrained(path)
    assert all(run_ranks(loaded_on_devices, 2, path, backend=None, timeout=300))
    first = AutoModelForCausalLM.from_pretrained(path).state_dict()
    again = AutoModelForCausalLM.from_pretrained(f"{path}-again").state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
