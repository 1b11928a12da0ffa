"""What dropouts of a split model dropped, and the same imposed on the whole model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.run import seeds, streams
from plait.state import state_of
from plait.testing import add_noise, parity, tiny

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 72, "n_layer": 2, "n_head": 9, "n_inner": 50, "n_positions": 64}
    | {"embd_pdrop": 0.1, "attn_pdrop": 0.3, "resid_pdrop": 0.2},
    "gpt_neox": {"hidden_dropout": 0.2, "attention_dropout": 0.3, "num_attention_heads": 8},
    "llama": {"attention_dropout": 0.3, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"hidden_size": 36},
    "bert": {"is_decoder": True, "hidden_dropout_prob": 0.2, "num_attention_heads": 8}
    | {"attention_probs_dropout_prob": 0.3},
    "opt": {"ffn_dim": 50, "word_embed_proj_dim": 96, "num_attention_heads": 8, "dropout": 0.2}
    | {"attention_dropout": 0.3, "activation_dropout": 0.1},
    "bart": {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 50}
    | {"decoder_ffn_dim": 48, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    | {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}
    | {"forced_eos_token_id": None, "decoder_start_token_id": 2},
    "t5": {"d_model": 96, "d_kv": 4, "d_ff": 50, "num_layers": 1, "num_decoder_layers": 1}
    | {"num_heads": 8, "dropout_rate": 0.2, "decoder_start_token_id": 0},
}
"""Fields per model type, on top of those of `tiny`."""


class Block(nn.Module):
    """Dropouts written into the code of a block: between two split layers, and after them."""

    def __init__(self, hidden: int = 24, width: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.inner, self.norm = 0.4, nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), p=self.inner, training=self.training)
        return x + self.dropout(self.down(y))


class Blocks(nn.Module):
    """Blocks with torch's own checkpointing, or without."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def gradient_checkpointing_enable(self, kwargs: dict[str, bool]) -> None:
        self.use_reentrant = kwargs["use_reentrant"]


BLOCKS_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def pair(name: str, mesh: Any = None, attention: str = "eager", **fields: Any) -> tuple[Any, Any]:
    """A model whose dropouts drop, with noise on every parameter, and the same split."""
    with seeds.borrowed(0):
        whole = _blocks() if name == "blocks" else _language_model(name, attention, fields)
    add_noise(whole)
    split = copy.deepcopy(whole)
    plan = BLOCKS_PLAN if name == "blocks" else None
    plait.parallelize(split, tp_plan=plan, device_mesh=mesh, check=False)
    return split.train(), whole.train()


def _blocks() -> nn.Module:
    return Blocks().double()


def _language_model(name: str, attention: str, fields: dict[str, Any]) -> nn.Module:
    import transformers

    made = {**tiny.SIZES, **SIZES[name], "attn_implementation": attention, **fields}
    if name in ("gpt2", "bart", "t5"):
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers"):
            made.pop(key)
        for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            made.pop(key) if key != "max_position_embeddings" or name == "t5" else None
    config = transformers.AutoConfig.for_model(name, **made)
    if name in ("bart", "t5"):
        return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def checkpointed(model: Any, use_reentrant: bool) -> None:
    """Gradient checkpointing whose blocks compute in float64 when they are recomputed, too."""
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for part in model.modules():
        run = part.__dict__.get("_gradient_checkpointing_func")
        if run is not None:
            part.__dict__["_gradient_checkpointing_func"] = _Exactly(run)


class _Exactly:
    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, forward: Any, *args: Any) -> Any:
        def exactly(*inputs: Any) -> Any:
            with parity.exact():
                return forward(*inputs)

        return self.run(exactly, *args)


def batch(name: str) -> dict[str, Tensor]:
    """A batch for `pair(name)`; for "blocks" an `x`."""
    if name == "blocks":
        draw = torch.Generator().manual_seed(0)
        return {"x": torch.randn(3, 5, 24, generator=draw, dtype=torch.float64, requires_grad=True)}
    return tiny.batch("llama", size=3, length=5)


class Masks:
    """Takes the place of `F.dropout`: keeps what a split model drops, imposes it on the whole one.

    Attributes:
        kept: Of each call: the mask (True: kept), and the stream it came from.
        num_recomputed: Calls in a backward; each must drop what one in the forward dropped.
    """

    def __init__(self, split: nn.Module, whole: nn.Module) -> None:
        self.kept: list[tuple[Tensor, int]] = []
        self.num_recomputed = 0
        self._imposed: list[list[Tensor]] | None = None
        self._places = [found.places for found in state_of(split).plan.heads.values()]  # type: ignore[union-attr]
        split.register_forward_pre_hook(lambda *_: self._start())
        whole.register_forward_pre_hook(lambda *_: self._impose())

    def _start(self) -> None:
        self.kept, self._imposed, self.num_recomputed = [], None, 0

    def _impose(self) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [mask for mask, _ in self.kept])
        self._imposed = [list(masks) for masks in zip(*every, strict=True)]

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        if self._imposed is not None:
            return input * _joined(self._imposed.pop(0), input.shape, self._places) / (1 - p)
        with torch.no_grad():
            mask = torch.empty_like(input).bernoulli_(1 - p).bool()
        if torch._C._current_graph_task_id() != -1:
            self.num_recomputed += 1
            assert any(torch.equal(mask, known) for known, _ in self.kept), "dropped other elements"
        else:
            self.kept.append((mask, streams.current()))
        return input * mask / (1 - p)


@contextmanager
def watching(split: nn.Module, whole: nn.Module) -> Iterator[Masks]:
    """All dropouts inside go through `Masks`."""
    masks, before = Masks(split, whole), F.dropout
    F.dropout = masks.dropout
    try:
        yield masks
    finally:
        F.dropout = before


def _joined(parts: list[Tensor], shape: torch.Size, places: list[Any]) -> Tensor:
    """The mask of a whole tensor from those of the ranks' parts."""
    if all(part.shape == shape for part in parts):
        assert all(torch.equal(part, parts[0]) for part in parts), "ranks dropped other elements"
        return parts[0]
    dim = next(d for d, size in enumerate(shape) if parts[0].shape[d] != size)
    if dim == 1 and len(shape) == 4:  # by head: some heads may be computed twice on a rank
        whole = torch.zeros(shape, dtype=torch.bool)
        of_rank = next(p for p in places if _fits(p, parts))
        for rank, part in enumerate(parts):
            for position, head in reversed(list(enumerate(of_rank(rank)))):
                whole[:, head] = part[:, position]
        return whole
    return torch.cat(parts, dim)


def _fits(places: Any, parts: list[Tensor]) -> bool:
    return all(len(places(rank)) == part.shape[1] for rank, part in enumerate(parts))
