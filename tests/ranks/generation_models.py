"""Tiny models for the tests of generate(): whole everywhere but for a head split by hand."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait import comm
from plait.comm import chunk_sizes
from plait.hf.generation import install

VOCAB = 203  # prime: the ranks' parts differ


class Head(nn.Module):
    """A whole head whose logits are rounded to a grid, so that many of them are equal."""

    def __init__(self, weight: torch.Tensor, grid: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.grid = grid

    def local(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.weight)
        return logits if self.grid is None else (logits / self.grid).round() * self.grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.local(x)


class SplitHead(Head):
    """This rank's part of the vocabulary, with the border of a `colwise_gather_output` head."""

    def __init__(self, head: Head, mesh: DeviceMesh) -> None:
        sizes = chunk_sizes(head.weight.shape[0], mesh.size())
        super().__init__(head.weight.detach().split(sizes)[mesh.get_local_rank()], head.grid)
        self.mesh, self.sizes = mesh, sizes

    def __deepcopy__(self, memo: dict) -> "SplitHead":
        twin = copy.copy(self)
        twin._parameters = {"weight": nn.Parameter(self.weight.detach().clone())}
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.local(x)
        border = self.__dict__.get("_plait_output")
        if border is not None:
            return border(logits)
        return comm.all_gather(logits, self.mesh, dim=-1, sizes=self.sizes)


def tp_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def whole_model(kind: str = "llama", grid: float | None = None, dtype=torch.float64, **settings):
    """A model of two layers with noise in every parameter, the same in every process."""
    import transformers

    config_class = getattr(transformers, {"llama": "LlamaConfig", "gemma2": "Gemma2Config"}[kind])
    config = config_class(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, **settings,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.lm_head = Head(model.lm_head.weight.detach() * 2, grid)
    model.generation_config.pad_token_id = 0
    return model


def split_model(whole: nn.Module, mesh: DeviceMesh):
    """A copy of `whole` with the head split over `mesh` and generate() installed."""
    model = copy.deepcopy(whole)
    model.lm_head = SplitHead(model.lm_head, mesh)
    install(model, mesh)
    return model


def prompt(rows: int = 3, length: int = 5) -> dict[str, torch.Tensor]:
    """Left-padded rows of different lengths."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, :row], mask[row, :row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
