"""Do the whole model and the split one generate the same tokens?"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import exchange
from plait.errors import PlaitError
from plait.proof.numbers import TOLERANCES
from plait.proof.report import Row
from plait.proof.runs import attempt
from plait.run import seeds

NEW_TOKENS = 6
_FOR_TRAINING = ("labels", "decoder_input_ids", "decoder_attention_mask")


def compare_tokens(
    whole: nn.Module, split: nn.Module, batch: Mapping[str, Any], mesh: DeviceMesh
) -> Row | None:
    """Generate greedily with both, with their caches.

    Args:
        whole: The whole model.
        split: The split one.
        batch: Arguments of the forward; those that belong to training are left out.
        mesh: The axis.

    Returns:
        The row, or None for a model that does not generate.

    Raises:
        PlaitError: The ranks did not meet in the split model's `generate`.

    Comm: that of the split model's `generate`, and two exchanges of control messages.
    """
    can = getattr(whole, "can_generate", None)
    if can is None or not can():
        return None
    inputs = {name: x for name, x in batch.items() if name not in _FOR_TRAINING}
    expected, failure = attempt(lambda: _generate(whole, inputs), mesh)
    if failure is not None or expected is None:
        why = failure.text if failure is not None else "it gives nothing"
        return Row("", "tokens", "generate", ok=None, note=f"the whole model does not: {why}")
    tokens, failure = attempt(lambda: _generate(split, inputs), mesh)
    if failure is not None and failure.echo:
        raise PlaitError(
            f"Generating with {type(split).__name__}, split:",
            f"the ranks did not meet: {failure.text}",
            "generate=False",
        )
    if failure is not None or tokens is None:
        text = failure.text if failure is not None else "nothing is generated"
        return Row("", "tokens", "error", ok=False, note=text)
    same = all(exchange(torch.equal(tokens, expected), mesh))
    note = f"{NEW_TOKENS} greedy tokens"
    if not same and all(exchange(_is_close_call(whole, inputs, tokens, expected), mesh)):
        return Row("", "tokens", "generate", ok=None, note=f"{note}: two have the same score")
    return Row("", "tokens", "generate", ok=same, note=note)


def _generate(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    with seeds.borrowed(0), torch.no_grad():
        tokens: torch.Tensor = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1
        )
    return tokens


def _is_close_call(
    model: Any, inputs: Mapping[str, Any], tokens: torch.Tensor, expected: torch.Tensor
) -> bool:
    """Whether the first tokens that differ have scores too near for the model's dtype."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    length = min(tokens.shape[1], expected.shape[1])
    differ = (tokens[:, :length] != expected[:, :length]).any(0).nonzero()
    if "input_ids" not in inputs or dtype == torch.float64 or not len(differ):
        return False
    at = int(differ[0])
    if not torch.equal(expected[:, : inputs["input_ids"].shape[1]], inputs["input_ids"]):
        return False  # an encoder-decoder: the prompt is not part of what is generated
    with torch.no_grad():
        scores = model(input_ids=expected[:, :at]).logits[:, -1].float()
    rows = torch.arange(len(scores))
    gap = (scores[rows, expected[:, at]] - scores[rows, tokens[:, at]]).abs().max()
    return bool(gap <= TOLERANCES[dtype] * scores.abs().max())
